"""Trains with commits to disk while recorder.c records: each scenario in a child, in a folder of its own.

Arguments: for each scenario `name` or `name:mutant`. A mutant is the same code with an error that the simulated losses
of power must find.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import stat
import sys
import threading
import traceback
from pathlib import Path

import torch

from ddp import elastic
from ddp.elastic import commits
from ddp.elastic.contents import Contents
from ddp.elastic.files import folders
from ddp.elastic.files.folders import open_folder
from ddp.elastic.files.writer import Writer
from ddp.elastic.images import kept_images
from ddp.elastic.keeper import Keeper, Signature

RECORDER = ctypes.CDLL(None)
N_FLOATS = 3000  # several pages
STEPS = 4


def mark(number):
    RECORDER.recorder_mark(number)


def new_state(there, **options):
    x, y = torch.zeros(N_FLOATS), torch.zeros(N_FLOATS, dtype=torch.int64)
    state = elastic.State(x=x, y=y, step=0, folder=there, disk_every=1, **options)
    state.resume()
    return state


def train(there, steps=STEPS, keep=1):
    state = new_state(there, keep=keep)
    for _step in range(steps):
        state.step += 1
        state.x.fill_(state.step)
        state.y.fill_(state.step)
        state.commit()
        state.flush()
        mark(state.step)  # from here on it must never be lost
    state.close()


def two_ranks(there):
    """Without a process group: each rank writes its part, and the last one the manifest."""
    contents = Contents({"x": torch.zeros(N_FLOATS), "y": torch.zeros(N_FLOATS), "step": 0})
    place = Path(os.environ["DDP_SCRATCH"])
    keepers = []
    for rank in (0, 1):
        role = commits.CommitRole(rank, rank, 2, keeps_replicas=rank == 0, writes_disk=True)
        writer = Writer(open_folder(there), 1, rank == 0, "lineage", commits.CommitName(0, ""))
        signature = Signature("lineage", role, rank, 2, contents.fingerprint())
        keepers.append(Keeper(kept_images.Slots([place], rank, 3), writer, signature))
    for number in range(1, 2 * STEPS):
        for name in ("x", "y"):
            contents.fields[name].fill_(number)
        contents.fields["step"] = number
        ranks = [threading.Thread(target=commit, args=(each, contents, number)) for each in keepers]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        mark(number)


def commit(keeper, contents, number):
    keeper.keep(contents.capture(), number, to_disk=True)
    keeper.flush()


def killed(there, at):
    """Killed at a call, then started again."""
    if os.fork() == 0:
        RECORDER.recorder_fail(ord("*"), at, 0)
        train(there)
        os._exit(0)
    os.wait()
    train(there, 2)


def failing(there, op, nth, error, how):
    """A call fails, once or from then on; the training goes on, and says what is not on the disk."""
    state, said = new_state(there, keep=2), []
    RECORDER.recorder_fail(ord(op), int(nth) if how == "once" else -int(nth), getattr(errno, error))
    for _step in range(STEPS):
        state.step += 1
        state.x.fill_(state.step)
        state.y.fill_(state.step)
        for call in (state.commit, state.flush):
            try:
                call()
            except elastic.CommitError as problem:
                said.append(str(problem))
                break
        else:
            mark(state.step)
    RECORDER.recorder_fail(ord(op), 0, 0)
    state.close()
    print(json.dumps(["-".join(("fails", op, nth, error, how)), said]), flush=True)


def unreadable(there):
    """The file of the newest commit cannot be opened at the resume."""
    train(there, keep=2)
    os.environ["DDP_SCRATCH"] += "-of-another-node"
    os.mkdir(os.environ["DDP_SCRATCH"], 0o700)
    RECORDER.recorder_fail(ord("R"), 2, errno.EIO)  # after the mark of a rejected commit, which is not there
    state = new_state(there)
    print(json.dumps(["unreadable", state.step]), flush=True)
    state.close()


# --- mutants -----------------------------------------------------------------------------------------


def is_folder(fd):
    return stat.S_ISDIR(os.fstat(fd).st_mode)


def rename_then_sync(old, new):
    os.rename(old, new)
    fd = os.open(new, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def with_calls(**changed):
    folders.os = type("os", (), vars(os) | changed)


def become(mutant):
    match mutant:
        case "":
            pass
        case "files-are-not-synced":
            with_calls(fsync=lambda fd: os.fsync(fd) if is_folder(fd) else None)
        case "names-are-not-synced":
            with_calls(fsync=lambda fd: None if is_folder(fd) else os.fsync(fd))
        case "the-name-comes-before-the-data":
            with_calls(fsync=lambda fd: os.fsync(fd) if is_folder(fd) else None, rename=rename_then_sync)
        case "folders-of-commits-are-not-synced":
            folders.LocalFolder._make = lambda _self, path: path.mkdir(parents=True, exist_ok=True)
        case "old-folders-are-believed":
            folders.LocalFolder._make = only_what_is_missing
        case "nobody-waits-for-other-ranks":
            folders.LocalFolder.settle = lambda _self, _path: None
        case _:
            raise ValueError(mutant)


def only_what_is_missing(_self, path):
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        folders._sync(each.parent)


def play(name, there):
    if name.startswith("killed-at-"):
        killed(there, int(name.removeprefix("killed-at-")))
    elif name.startswith("fails-"):
        failing(there, *name.split("-")[1:])
    elif name == "unreadable":
        unreadable(there)
    elif name == "two-ranks":
        two_ranks(there)
    else:
        train(there, keep=int(name.removeprefix("keep-")))


def main():
    torch.set_num_threads(1)
    folders._BEGIN_EVERY = 4096  # early write-back, also of these small files
    for number, words in enumerate(sys.argv[1:]):
        name, _, mutant = words.partition(":")
        os.environ["DDP_SCRATCH"] = os.path.join(os.environ["SCRATCH"], str(number))
        os.mkdir(os.environ["DDP_SCRATCH"], 0o700)
        mark(-1)  # the next scenario begins
        if (child := os.fork()) == 0:
            code = 1
            try:
                become(mutant)
                play(name, Path(os.environ["RECORDER_ROOT"], str(number), "deep", "commits"))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{words} failed")


if __name__ == "__main__":
    main()
