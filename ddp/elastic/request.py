"""Whether somebody wants a checkpoint now, and the answer that there is one.

The launcher names a file in DDP_CHECKPOINT_REQUEST. It is there when a checkpoint is asked for, with one
line of JSON: `{"reason": "...", "deadline_s": 30.0}`, counted from when the file was written; null for no
hurry. A rank that has made its checkpoint durable says so by an empty file beside it, whose name ends in
`.done.<RANK>`.

A rank that looks for requests says so by another empty file, `.watched.<RANK>`: only then is it worth the
launcher's while to ask before it stops the ranks. From then on the rank leaves it to the launcher to answer the
signals of a scheduler (ddp/groups/_core/signals.c).
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from ddp.groups import core_loading

_VARIABLE = "DDP_CHECKPOINT_REQUEST"
_PATIENCE_S = 5.0  # after a signal that the launcher should have seen as well


@dataclass(frozen=True, slots=True)
class CheckpointRequest:
    reason: str
    remaining_s: float  # infinite: no hurry


def _path() -> str:
    return os.environ.get(_VARIABLE, "")


def _answer(path: str) -> str:
    return f"{path}.done.{os.environ.get('RANK', '0')}"


@functools.cache
def watch() -> None:
    """Once per process. Without the compiled core a scheduler's signal ends the rank, as it does any process."""
    path = _path()
    if not path:
        return
    native = core_loading.native()
    if native is not None:
        for signum in (signal.SIGTERM, signal.SIGUSR1):
            native.guard_signal(signum, _PATIENCE_S)
    with contextlib.suppress(OSError):
        Path(f"{path}.watched.{os.environ.get('RANK', '0')}").touch(mode=0o600)


def _forgive() -> None:
    native = core_loading.native()
    if native is not None:
        native.forgive_signal()


def _heed_what_nobody_answered() -> None:
    native = core_loading.native()
    if native is not None and (signum := native.overdue_signal()):
        os.kill(os.getpid(), signum)  # it was meant for this rank alone, and is heeded the second time


def checkpoint_requested() -> bool:
    """As this rank sees it; no more once it has answered. Others may not have heard: State.should_checkpoint()."""
    path = _path()
    watch()
    asked = bool(path) and os.path.exists(path)
    if asked or not path:
        _forgive()
    else:
        _heed_what_nobody_answered()
    # The question goes before its answers: one without an answer must still be there after that look.
    return asked and not os.path.exists(_answer(path)) and os.path.exists(path)


def checkpoint_request() -> CheckpointRequest | None:
    """What is known of it here."""
    path = _path()
    if not path:
        return None
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
            age_s = time.time() - os.fstat(file.fileno()).st_mtime
        said = json.loads(text)
        reason, deadline_s = str(said["reason"]), said["deadline_s"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return CheckpointRequest("a request that cannot be read", math.inf)
    return CheckpointRequest(reason, math.inf if deadline_s is None else float(deadline_s) - age_s)


def checkpoint_done() -> None:
    """This rank's checkpoint is durable. Without a launcher there is nobody to tell."""
    path = _path()
    if path:
        # A node that is asked last counts what was taken just before: its ranks may never see the question.
        _forgive()
        Path(_answer(path)).touch(mode=0o600)
