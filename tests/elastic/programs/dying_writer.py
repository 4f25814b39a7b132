"""A rank whose writer is killed at another point in each generation, and which then looks at what is left."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import torch

from ddp import elastic
from ddp.elastic.files import folders

THERE = Path(os.environ["THERE"])
POINTS = ("half-written", "written", "before its name", "named", "before the manifest")


def die(*_arguments, **_more):
    os.kill(os.getpid(), signal.SIGKILL)


def with_death_at(point):
    halves = iter([os.write, die])
    syncs = iter([os.fsync, die])
    renames = iter([os.rename, die])

    def rename(*words):
        os.rename(*words)
        die()

    match point:
        case "half-written":
            changed = {"write": lambda fd, data: next(halves)(fd, data[:100])}
        case "written":
            changed = {"fsync": lambda fd: next(syncs)(fd)}  # first of the folder around the commit's
        case "before its name":
            changed = {"rename": die}
        case "named":
            changed = {"rename": rename}
        case "before the manifest":
            changed = {"rename": lambda *words: next(renames)(*words)}
    return type("os", (), vars(os) | changed)


def state_in(point):
    # Only the disk is to be gone back to.
    os.environ["DDP_SCRATCH"] = str(THERE / f"scratch-{os.getpid()}-{POINTS.index(point)}")
    Path(os.environ["DDP_SCRATCH"]).mkdir(mode=0o700)
    state = elastic.State(x=torch.zeros(1000), step=0, folder=THERE / point, disk_every=1, keep=9)
    return state, state.resume()


def look(point):
    state, resumed = state_in(point)
    found = {"point": point, "number": resumed.number, "step": state.step, "x": state.x.unique().tolist()}
    found["files"] = sorted(
        str(path.relative_to(THERE / point)) for path in (THERE / point).rglob("*") if path.is_file()
    )
    with open(THERE / "looked", "a") as file:
        file.write(json.dumps(found) + "\n")
    state.close()


def train(point):
    state, _nothing = state_in(point)
    for state.step in (1, 2, 3):
        state.x = state.x + 1
        if state.step == 3:
            state.flush()
            folders.os = with_death_at(point)
        state.commit()
    state.flush()


generation = int(os.environ["DDP_GENERATION"])
if generation > 1:
    look(POINTS[generation - 2])
if generation <= len(POINTS):
    train(POINTS[generation - 1])
