"""One job whose process is killed again and again, at random instants of resume, commit and write or upload.

Arguments: a place for it, a seed, the number of kills, and the folder of its commits, which may be a URL. Each
generation is forked from this process, which has imported torch. It says on a pipe what was complete; the next
generation must find it, with a state that belongs to one step.
"""

import importlib
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

import torch

from ddp import elastic
from ddp.elastic.files import folders
from ddp_launch_wings.inspection import commit_list
from ddp_launch_wings.inspection import saved_commits as inspection

FOLDER = sys.argv[4]
IS_REMOTE = "://" in FOLDER
FLOATS = 900_000 if IS_REMOTE else 3000  # an upload in two parts
_MANY = 60  # kills; fewer are not expected to meet the rarest moment
_AT_MOST = 4  # times as many kills, until each other moment was met: which one is met depends on the machine
AFTER = {"b": "in the resume", "u": "in a write"}  # what was told last; otherwise it trains


def train(lost, tell):
    """Check what is resumed, then commit until the end comes; `lost`: what must be there at least."""
    tell("b", 0)
    state = elastic.State(
        x=torch.zeros(FLOATS), y=torch.zeros(FLOATS), step=0, folder=FOLDER, disk_every=1, keep=1
    )
    resumed = state.resume()
    found = (0 if resumed is None else resumed.number, state.step)
    values = set(state.x.unique().tolist()) | set(state.y.unique().tolist())
    assert values == {float(state.step)}, f"a mix of steps: {values}, {found}"
    assert found[0] == found[1] >= lost, f"commit {lost} is lost: {found}"
    tell("r", state.step)
    while True:
        state.step += 1
        state.x.fill_(state.step)
        state.y.fill_(state.step)
        if state.step % 3 == 0 and IS_REMOTE:  # commit() leaves out what is due while another one is uploaded
            tell("u", state.step)
            state.checkpoint()
        else:
            state.commit()
        tell("m", state.step)
        if state.step % 3 == 0:
            if not IS_REMOTE:
                tell("u", state.step)
                state.flush()
            tell("d", state.step)


def usual_span(folder, tell):
    """How long a generation takes to its sixth commit."""
    begin = time.monotonic()
    state = elastic.State(x=torch.zeros(FLOATS), y=torch.zeros(FLOATS), step=0, folder=folder, disk_every=1)
    state.resume()
    for state.step in range(1, 7):
        state.commit()
        state.flush()
    state.close()
    tell("s", time.monotonic() - begin)


def generation(run, after_s=None):
    """Fork a process that runs this, and kill it after a while. Return the lines that it told."""
    out, into = os.pipe()
    if (child := os.fork()) == 0:
        os.close(out)
        try:
            run(lambda what, fact: os.write(into, f"{what} {fact}\n".encode()))
        except BaseException:
            os.write(into, b"e " + json.dumps(traceback.format_exc()).encode() + b"\n")
        finally:
            os._exit(1)
    os.close(into)
    if after_s is not None:
        time.sleep(after_s)  # this is the random instant
        os.kill(child, signal.SIGKILL)
    with os.fdopen(out) as file:
        lines = [line.rstrip().split(" ", 1) for line in file]
    os.waitpid(child, 0)
    for what, rest in lines:
        if what == "e":
            sys.exit(json.loads(rest))
    return lines


def prepare():
    """Import what is imported on the way, so that each process need not. Return the usual span of one."""
    if IS_REMOTE:
        importlib.import_module("s3fs")

        folders._PIECE = 5 << 20  # the smallest part that S3 takes
    aside = f"{FOLDER}-aside"
    for _first in range(2):
        ((_what, span_s),) = generation(lambda tell: usual_span(aside, tell))
    return float(span_s)


def check_all():
    """What is left is whole wherever it says so, and there is not more of it after each kill."""
    folder = folders.open_folder(FOLDER)
    left = commit_list.listed(folder)
    for each in left:
        if each.has_manifest:
            assert not (problems := list(inspection.problems(folder, each))), problems
    assert 0 < len(left) < 10, left
    return len(left)


def main():
    there, rng, kills = Path(sys.argv[1]), random.Random(int(sys.argv[2])), int(sys.argv[3])
    torch.set_num_threads(1)
    os.environ |= {"DDP_SCRATCH": str(there / "scratch"), "TORCHELASTIC_RUN_ID": "killed"}
    (there / "scratch").mkdir(mode=0o700)
    in_memory = on_disk = 0
    span_s = prepare()
    met = {"in the resume": 0, "in a write": 0, "while it trains": 0, "from disk": 0}
    wanted = {what for what in met if kills >= _MANY or what != "while it trains"}
    for kill in range(_AT_MOST * kills):
        if kill >= kills and all(met[what] for what in wanted):
            break
        if rng.random() < 0.4:  # the node is lost as well
            shutil.rmtree(there / "scratch")
            (there / "scratch").mkdir(mode=0o700)
            in_memory = 0
            met["from disk"] += 1
        lost = max(in_memory, on_disk)
        lines = generation(lambda tell, lost=lost: train(lost, tell), rng.uniform(0, 1.5 * span_s))
        for what, rest in lines:
            in_memory = max(in_memory, int(rest)) if what in "rmd" else in_memory
            on_disk = max(on_disk, int(rest)) if what == "d" else on_disk
        met[AFTER.get(lines[-1][0], "while it trains") if lines else "in the resume"] += 1
    print(json.dumps(met | {"commits left": check_all(), "steps": max(in_memory, on_disk)}))


main()
