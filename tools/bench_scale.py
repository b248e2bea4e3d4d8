#!/usr/bin/env python3
"""How the runner scales: what a stage costs beside its own work, and what a large data set costs to plan.

    tools/bench_scale.py [--pipeline target/debug/pipeline] [--stages 100] [--rows 1000000]

Needs pyarrow for the second, which ingests all rows once (minutes). Prints one line a measurement, with the promise it is
held against; time is that of the processors, so that a busy machine does not count, and that of the clock beside it.
"""

import argparse
import os
import resource
import struct
import subprocess
import tempfile
import time
import zlib

STAGE = """#!/bin/sh
verb=${0##*/pipeline-}
case "$1" in
describe) cat <<END
{"contract": 1, "stage": "$verb", "version": 1, "about": "", "output": "x", "tables": {}, "resumable": false,
 "devices": ["cpu"], "inputs": INPUTS, "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}},
 "settings": {"type": "object", "properties": {}}}
END
;;
check) echo '{"key": {"verb": "'$verb'"}, "sources": [], "consulted": [], "notes": [], "problems": []}' ;;
run)
  out=$(sed -n 's/.*"output": "\\(.*\\)".*/\\1/p' "$3")
  echo "$verb" > "$out/x"
  echo '{"event": "done", "summary": "", "ledger": {"in": 0, "out": 0, "rejected": 0, "held": 0}, "info": null}' ;;
esac
"""


def timed(command, cwd):
    """Seconds of the processors, all processes together, and of the clock."""
    used = lambda: sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    began, before = time.monotonic(), used()
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{command}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return used() - before, time.monotonic() - began


def fan_out(pipeline, count):
    with tempfile.TemporaryDirectory() as folder:
        graph, recipe = "", 'name = "fan"\n'
        os.mkdir(os.path.join(folder, "bin"))
        for number in range(count + 1):
            name = f"s{number}"
            path = os.path.join(folder, "bin", f"pipeline-{name}")
            with open(path, "w") as file:
                file.write(STAGE.replace("INPUTS", "{}" if number == 0 else '{"a": "x"}'))
            os.chmod(path, 0o755)
            graph += f'[stage.{name}]\nprogram = "bin/pipeline-{name}"\n' + ('inputs = { a = "s0" }\n' if number else "")
            recipe += f"[{name}]\n"
        for name, text in [("pipeline.toml", graph), ("fan.toml", recipe)]:
            with open(os.path.join(folder, name), "w") as file:
                file.write(text)
        timed([pipeline, "plan", "fan.toml"], folder)
        first = timed([pipeline, "run", "fan.toml"], folder)
        # What a stage costs itself: a shell is started, does its work, and ends.
        with open(os.path.join(folder, "request"), "w") as file:
            file.write(f' "output": "{folder}"\n')
        loop = f"for i in $(seq {count + 1}); do bin/pipeline-s1 run --request request > /dev/null; done"
        alone = timed(["sh", "-c", loop], folder)
        each = [1000 * (a - b) / (count + 1) for a, b in zip(first, alone)]
        print(f"{count + 1} stages: {first[0]:.2f} s ({first[1]:.2f} s by the clock), {alone[0]:.2f} s of them their own; "
              f"{each[0]:.1f} ms a stage ({each[1]:.1f} ms) (promise: 10 ms)")
        again = timed([pipeline, "run", "fan.toml"], folder)
        print(f"the same, all cached: {again[0]:.2f} s ({again[1]:.2f} s) (promise: 5 s)")


def picture(number):
    """A PNG of 8 x 8 grey pixels, another one for each number."""
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    rows = [b"\0" + struct.pack(">Q", number + row) for row in range(8)]
    header = struct.pack(">IIBBBBB", 8, 8, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"".join(rows), 1)) + chunk(b"IEND", b"")


def rows(pipeline, count):
    import pyarrow
    import pyarrow.parquet

    with tempfile.TemporaryDirectory() as folder:
        os.mkdir(os.path.join(folder, "data"))
        table = pyarrow.table({"image": pyarrow.array(map(picture, range(count)), pyarrow.binary()),
                               "text": pyarrow.array([f"caption {n}" for n in range(count)])})
        pyarrow.parquet.write_table(table, os.path.join(folder, "data", "a.parquet"), row_group_size=1000)
        with open(os.path.join(folder, "rows.toml"), "w") as file:
            file.write('name = "rows"\n[ingest]\ndataset = "data"\nimage_column = "image"\ncaption_column = "text"\n')

        def measured(what, verb, promise):
            seconds = timed([pipeline, verb, "rows.toml"], folder)
            memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
            print(f"{count} rows: {what} {seconds[0]:.2f} s ({seconds[1]:.2f} s), {memory:.0f} MiB at most so far{promise}", flush=True)

        promise = " (promise: 5 s, 1024 MiB)"
        measured("plan", "plan", promise)
        measured("plan, again", "plan", promise)
        measured("run", "run", "")
        measured("run, nothing changed", "run", promise)
        measured("plan, nothing changed", "plan", promise)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipeline", default="target/debug/pipeline")
    parser.add_argument("--stages", type=int, default=100)
    parser.add_argument("--rows", type=int, default=1_000_000)
    args = parser.parse_args()
    fan_out(os.path.abspath(args.pipeline), args.stages)
    rows(os.path.abspath(args.pipeline), args.rows)


if __name__ == "__main__":
    main()
