#!/usr/bin/env python3
"""A stage program in another language: the contract is JSON on files and pipes, nothing else.

Its verb is its file name. It copies its inputs and its `text` into `out.txt`, and writes each call into FAKE_LOG.
"""

import json
import os
import signal
import sys
import time

verb = os.path.basename(sys.argv[0]).removeprefix("pipeline-")
KINDS = {"dig": ({}, "ore"), "smelt": ({"ore": "ore"}, "metal"), "forge": ({"metal": "metal"}, "tool")}
INPUTS, OUTPUT = KINDS.get(verb, ({}, "thing"))


def note(what):
    with open(os.environ["FAKE_LOG"], "a") as log:
        log.write(f"{verb} {what}\n")


def say(**event):
    print(json.dumps(event), flush=True)


def describe():
    string, number, flag = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
    parameters = {"text": string, "amount": number, "source": string, "repo": string, "notes_file": string, "required_here": string}
    print(json.dumps({
        "contract": 1, "stage": os.environ.get("FAKE_NAME", verb), "version": int(os.environ.get("FAKE_VERSION", "1")),
        "about": "fake", "output": OUTPUT, "inputs": INPUTS, "tables": {}, "resumable": "FAKE_RESUMABLE" in os.environ, "devices": ["cpu"], "estimates": verb == "smelt",
        "ranks": ["cpu"] if verb == "smelt" else [],
        "parameters": {"type": "object", "properties": parameters, "additionalProperties": False,
                       "required": ["required_here"] if verb == "assay" else []},
        "settings": {"type": "object", "additionalProperties": False, "properties": {
            "workers": number, "fill": number, "seconds": {"type": "number"}, "end": string, "unbalanced": flag, "dump": string, "meet": string,
            "crashes": number, "refuses": number}},
    }))


def check(request):
    p = request["parameters"]
    answer = {"key": {"text": p.get("text", "default"), "amount": p.get("amount", 1)}, "sources": [], "consulted": [],
              "notes": [], "problems": []}
    if p.get("text") == "blunt" and verb == "forge":
        answer["problems"].append({"message": "a blade may not be `blunt`", "field": "text"})
    if p.get("text") == "bad":
        answer["problems"].append({"message": "`text` may not be `bad`", "field": "text", "help": "write something good"})
    if p.get("refuses") and request["ranks"] == p["refuses"]:
        answer["problems"].append({"message": f"no furnace for {request['ranks']} ranks"})
    if "source" in p:
        path = os.path.join(request["base_dir"], p["source"])
        answer["sources"].append({"name": "source", "kind": "path", "location": path, "revision": None, "parts": []})
    if "repo" in p:
        answer["sources"].append({"name": "repo", "kind": "hub_dataset", "location": p["repo"], "revision": None,
                                  "parts": ["*.txt"]})
    if "notes_file" in p:
        path = os.path.join(request["base_dir"], p["notes_file"])
        answer["consulted"].append(path)
        answer["key"]["notes"] = open(path).read()
        answer["written"] = {path: {"notes": 1}}
    print(json.dumps(answer))


def estimate(request):
    changed = request["changed"]
    items = {"name": "bars", "total": 2, "todo": 2 if changed is None else len(changed), "because": None}
    if changed:
        items["because"] = "ore of " + ", ".join(f"`{name}`" for name in changed) + " changed"
    print(json.dumps({"items": [items], "bytes": 12000000, "facts": ["1 batch a day"]}))


def other_rank(p, rank):
    """Shares nothing, but may fail; rank 0 then has lost it."""
    note(f"rank {rank}: " + " ".join(os.environ[name] for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")))
    print("hello log", file=sys.stderr, flush=True)
    if p.get("end") == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if p.get("end") == "fail":
        say(event="failed", problem={"message": f"rank {rank} of 2: the furnace is cold"}, exit=4)
        sys.exit(4)


def crash_at_first(times, out):
    """The last rank dies in so many tries; what a try left tells the next."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if rank != world - 1:
        return
    tries = len([name for name in os.listdir(out) if name.startswith("try")])
    if tries < times:
        open(os.path.join(out, f"try {tries} on {world}"), "w").close()
        os.kill(os.getpid(), signal.SIGKILL)


def run(request):
    p, out = request["parameters"], request["output"]
    if p.get("crashes"):
        crash_at_first(p["crashes"], out)
    if os.environ.get("RANK", "0") != "0":
        return other_rank(p, int(os.environ["RANK"]))
    if os.environ.get("WORLD_SIZE", "1") != "1" and p.get("end"):
        say(event="failed", problem={"message": "rank 0 of 2 lost another rank"}, exit=8)
        sys.exit(8)
    stop = []
    signal.signal(signal.SIGINT, lambda *_: stop.append(1))
    print("hello log", file=sys.stderr, flush=True)
    print("not an event", flush=True)
    say(event="progress", phase="working", done=1, total=2, unit="rows", note=None)
    with open(os.path.join(out, "out.txt"), "w") as file:
        file.write(p.get("text", "default").split("#")[0])
        for name in sorted(request["inputs"]):
            file.write("+" + open(os.path.join(request["inputs"][name], "out.txt")).read())
    try:
        with open(os.path.join(out, "fill.bin"), "wb") as file:
            for done in range(p.get("fill", 0)):
                file.write(os.urandom(1 << 20))
                file.flush()
                say(event="progress", phase="filling", done=done + 1, total=p["fill"], unit="MB", note=None)
    except OSError as error:
        say(event="failed", problem={"message": f"cannot write `fill.bin`: {error.strerror} (os error {error.errno})"}, exit=6)
        sys.exit(6)
    if not p.get("fill"):
        os.remove(os.path.join(out, "fill.bin"))
    if "meet" in p:
        # Goes on when two stages have come, and gives up when the other does not.
        open(os.path.join(p["meet"], verb), "w").close()
        for _ in range(int(p.get("seconds", 30) * 50)):
            if len(os.listdir(p["meet"])) == 2 or stop:
                break
            time.sleep(0.02)
        else:
            say(event="failed", problem={"message": f"nobody came; {request['threads']} threads"}, exit=1)
            sys.exit(1)
    started = time.time()
    while time.time() - started < p.get("seconds", 0) and not stop:
        time.sleep(0.02)
    if stop:
        say(event="failed", problem={"message": "interrupted"}, exit=130)
        sys.exit(130)
    end = p.get("end")
    if end == "fail":
        print("about to fail", file=sys.stderr, flush=True)
        say(event="failed", problem={"message": "the furnace is cold", "help": "light it"}, exit=4)
        sys.exit(4)
    if end == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if end == "mute":
        return
    if end == "link":
        os.symlink("/", os.path.join(out, "link"))
    elif os.path.islink(os.path.join(out, "link")):
        os.remove(os.path.join(out, "link"))
    if end == "edit":
        with open(request["sources"]["source"]["location"] + "/new.txt", "w") as file:
            file.write("late")
    say(event="progress", phase="working", done=2, total=2, unit="rows", note="all")
    say(event="warning", message="a bit warm")
    say(event="rejected", item="row 3", reason="dirty", detail="mud")
    say(event="done", summary=f"2 rows {verb}ed", info={"pid": 0, "new": {"bars": 2}},
        ledger={"in": 3, "out": 2, "rejected": 0 if p.get("unbalanced") else 1, "held": 0})


if os.environ.get("RANK", "0") == "0":
    note(sys.argv[1])
if sys.argv[1] == "describe":
    describe()
else:
    request = json.load(open(sys.argv[3]))
    assert sys.argv[2] == "--request" and request["contract"] == 1
    {"check": check, "estimate": estimate, "run": run}[sys.argv[1]](request)
