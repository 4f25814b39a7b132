"""Requests for a checkpoint from the launcher, and the rank's answer.

The launcher names a file in DDP_CHECKPOINT_REQUEST. The file exists while a checkpoint is requested. It has one line of
JSON: `{"reason": "...", "deadline_s": 30.0}`. The deadline counts from the time when the file was written; null means
no deadline. After its checkpoint is durable, a rank creates an empty file next to it with the suffix
`.done.<RANK>`.

A rank that checks for requests creates another empty file with the suffix `.watched.<RANK>`. The launcher requests a
checkpoint before it stops the ranks only if these files exist. From then on the rank ignores the signals of a
scheduler, and the launcher handles them (ddp/groups/_core/signals.c).
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
from ddp.telemetry.contracts import CHECKPOINT_REQUEST

_SIGNAL_GRACE_S = 5.0  # the time the launcher has to react to a signal that it should have received as well


@dataclass(frozen=True, slots=True)
class CheckpointRequest:
    reason: str
    remaining_s: float  # infinite: no deadline


def _path() -> str:
    return os.environ.get(CHECKPOINT_REQUEST, "")


def _answer_path(path: str) -> str:
    return f"{path}.done.{os.environ.get('RANK', '0')}"


@functools.cache
def watch() -> None:
    """Start to handle requests, once per process. Without the compiled core, a scheduler's signal ends the rank."""
    path = _path()
    if not path:
        return
    native = core_loading.native()
    if native is not None:
        for signum in (signal.SIGTERM, signal.SIGUSR1):
            native.guard_signal(signum, _SIGNAL_GRACE_S)
    with contextlib.suppress(OSError):
        Path(f"{path}.watched.{os.environ.get('RANK', '0')}").touch(mode=0o600)


def _forget_signal() -> None:
    native = core_loading.native()
    if native is not None:
        native.forgive_signal()


def checkpoint_requested() -> bool:
    """Whether this rank sees a request that it has not answered yet.

    Other ranks may not see it yet. `State.should_checkpoint()` returns the same result on all ranks.
    """
    path = _path()
    watch()
    is_requested = bool(path) and os.path.exists(path)
    if is_requested or not path:
        _forget_signal()
    else:
        native = core_loading.native()
        if native is not None and (signum := native.overdue_signal()):
            os.kill(
                os.getpid(), signum
            )  # the launcher did not get it, so it was for this rank; the second one has effect
    # The launcher removes the request before the answers. So a missing answer counts only if the request still exists.
    return is_requested and not os.path.exists(_answer_path(path)) and os.path.exists(path)


def checkpoint_request() -> CheckpointRequest | None:
    """Return the request as this rank sees it, or None."""
    path = _path()
    if not path:
        return None
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
            age_s = time.time() - os.fstat(file.fileno()).st_mtime
        fields = json.loads(text)
        reason, deadline_s = str(fields["reason"]), fields["deadline_s"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        return CheckpointRequest(f"cannot read the request file {path}: {error!r}", math.inf)
    return CheckpointRequest(reason, math.inf if deadline_s is None else float(deadline_s) - age_s)


def checkpoint_done() -> None:
    """Report that this rank's checkpoint is durable. Without a launcher this has no effect."""
    path = _path()
    if path:
        # The answer also counts if this node receives its request only later, and the rank never sees the request.
        _forget_signal()
        Path(_answer_path(path)).touch(mode=0o600)
