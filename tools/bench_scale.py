#!/usr/bin/env python3
"""How the runner scales: what a stage costs beside its own work, and what a large data set costs to plan.

    tools/bench_scale.py [--pipeline target/debug/pipeline] [--stages 100] [--rows 1000000]

Needs pyarrow for the second. Prints one line a measurement, with the promise it is held against.
"""

import argparse
import os
import resource
import subprocess
import tempfile
import time

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
    began = time.monotonic()
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{command}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return time.monotonic() - began


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
        alone = timed(["sh", "-c", f"for i in $(seq {count + 1}); do bin/pipeline-s1 describe > /dev/null; done"], folder)
        print(f"{count + 1} stages: {first:.2f} s, {alone:.2f} s of them their own; "
              f"{1000 * (first - alone) / (count + 1):.1f} ms a stage (promise: 10 ms)")
        print(f"the same, all cached: {timed([pipeline, 'run', 'fan.toml'], folder):.2f} s (promise: 5 s)")


def rows(pipeline, count):
    import pyarrow
    import pyarrow.parquet

    with tempfile.TemporaryDirectory() as folder:
        os.mkdir(os.path.join(folder, "data"))
        table = pyarrow.table({"image": pyarrow.array([b"\x89PNG"] * count, pyarrow.binary()),
                               "text": pyarrow.array([f"caption {n}" for n in range(count)])})
        pyarrow.parquet.write_table(table, os.path.join(folder, "data", "a.parquet"))
        with open(os.path.join(folder, "rows.toml"), "w") as file:
            file.write('name = "rows"\n[ingest]\ndataset = "data"\nimage_column = "image"\ncaption_column = "text"\n')
        for what in ["plan", "plan, again"]:
            seconds = timed([pipeline, "plan", "rows.toml"], folder)
            memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
            print(f"{count} rows: {what} {seconds:.2f} s, {memory:.0f} MiB at most (promise: 5 s, 1024 MiB)")


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
