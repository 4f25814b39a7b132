"""One job whose process is killed again and again, at random instants of resume, commit and write.

Arguments: a folder, a seed, the number of kills. Each generation is forked from this process, which has imported torch.
It says on a pipe what was complete; the next generation must find it, with a state that belongs to one step.
"""

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

FLOATS = 3000


def train(there, lost, tell):
    """Check what is resumed, then commit until the end comes; `lost`: what must be there at least."""
    state = elastic.State(
        x=torch.zeros(FLOATS), y=torch.zeros(FLOATS), step=0, folder=there / "commits", disk_every=1, keep=1
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
        state.commit()
        tell("m", state.step)
        if state.step % 3 == 0:
            state.flush()
            tell("d", state.step)


def usual_span(there):
    """How long a generation takes to its sixth commit. Whatever is imported on the way need not be again."""
    there.mkdir(mode=0o700)
    begin = time.monotonic()
    state = elastic.State(x=torch.zeros(FLOATS), y=torch.zeros(FLOATS), step=0, folder=there, disk_every=1)
    state.resume()
    for state.step in range(1, 7):
        state.commit()
    state.flush()
    state.close()
    return time.monotonic() - begin


def generation(there, lost, after_s):
    """The lines that it told before it was killed."""
    out, into = os.pipe()
    if (child := os.fork()) == 0:
        os.close(out)
        try:
            train(there, lost, lambda what, step: os.write(into, f"{what} {step}\n".encode()))
        except BaseException:
            os.write(into, b"e " + json.dumps(traceback.format_exc()).encode() + b"\n")
        finally:
            os._exit(1)
    os.close(into)
    time.sleep(after_s)  # this is the random instant
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(out) as file:
        return [line.rstrip().split(" ", 1) for line in file]


def main():
    there, rng, kills = Path(sys.argv[1]), random.Random(int(sys.argv[2])), int(sys.argv[3])
    torch.set_num_threads(1)
    os.environ |= {"DDP_SCRATCH": str(there / "scratch"), "TORCHELASTIC_RUN_ID": "killed"}
    (there / "scratch").mkdir(mode=0o700)
    in_memory = on_disk = 0
    usual_span(there / "first")
    span_s = usual_span(there / "second")
    met = {"before the resume": 0, "while it trains": 0, "from disk": 0}
    for _kill in range(kills):
        if rng.random() < 0.4:  # the node is lost as well
            shutil.rmtree(there / "scratch")
            (there / "scratch").mkdir(mode=0o700)
            in_memory = 0
            met["from disk"] += 1
        lines = generation(there, max(in_memory, on_disk), rng.uniform(0, 1.5 * span_s))
        for what, rest in lines:
            if what == "e":
                sys.exit(json.loads(rest))
            in_memory = max(in_memory, int(rest))
            on_disk = max(on_disk, int(rest)) if what == "d" else on_disk
        met["while it trains" if lines else "before the resume"] += 1
    print(json.dumps(met | {"steps": in_memory}))


main()
