"""The gate of a process that joins survivors: until it has joined, it forms groups, but does not communicate.

A replacement runs the script from its top, while the survivors wait for it in `state.run`. They take part in the
creation of groups only. So until `joined` is called in such a process (DDP_JOINS=1 in its environment):

    creating a group        is announced to the survivors, and real
    DistributedDataParallel skips the comparison and the broadcast of the model: the state comes with the resume
    barrier                 does nothing
    any other collective    raises, and the launcher learns that this script cannot be healed in place

A script may call `state.resume` itself, before `state.run`. The survivors take part in this resume, and are in their
loop after it. So the gate is closed again until `state.run` begins. A group that is created there cannot be formed
anew: the survivors have formed theirs before the resume.
"""

from __future__ import annotations

import functools
import logging
import os
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, BackendConfig

from ddp.groups import membership, reform, wrappers
from ddp.groups.rank_info import Announced
from ddp.groups.reform import Meeting
from ddp.groups.shared_work import FinishedWork
from ddp.telemetry import guard, status_page, torch_api, torch_names
from ddp.telemetry.coded import CodedError
from ddp.telemetry.collective_marks import FACTS, copy_name
from ddp.telemetry.contracts import GUARD, JOINS

_log = logging.getLogger("ddp")
_BARRIERS = ("barrier", "monitored_barrier")
_LIBRARIES = (os.path.dirname(os.path.dirname(torch.__file__)), os.path.dirname(os.path.dirname(__file__)))


class JoiningError(CodedError, RuntimeError):
    """The script communicates before the survivors do."""

    code = "DDP-7003"


class _Gate:
    def __init__(self) -> None:
        self.joined = False
        self.is_installed = False
        self.has_resumed = False  # and the survivors are in their loop
        self.trains = False
        self.meeting: Meeting | None = None

    @property
    def closed(self) -> bool:
        return not self.joined and os.environ.get(JOINS) == "1"


_gate = _Gate()
_group_classes: list[Any] = [dist.ProcessGroup]


def is_joining() -> bool:
    """Whether this process joins survivors and has not joined them yet."""
    return _gate.closed


def is_alone() -> bool:
    """Whether objects are constructed without communication now: other ranks do not construct theirs."""
    return _gate.closed or reform.is_reforming()


def joined() -> None:
    """From now on this process communicates with the survivors. The groups it has are those that heal later."""
    if _gate.closed and _gate.has_resumed:
        refuse("the resume of another State")
    if _gate.closed and _gate.meeting is not None:
        _gate.meeting.end()
    _gate.joined, _gate.meeting = True, None
    reform.mark()


def resumed() -> None:
    """The script has called `state.resume` itself. The survivors do not wait for what comes before `state.run`."""
    if not _gate.trains and os.environ.get(JOINS) == "1":
        _gate.joined, _gate.has_resumed = False, True


def trains(obstacle: str = "") -> None:
    """`state.run` begins for the first time: what the script does from now on, the survivors do as well.

    `obstacle`: why its States cannot go on after a failure.
    """
    if _gate.trains:
        return
    _gate.joined = _gate.trains = True
    if os.environ.get(JOINS) == "1":  # the ranks before this one have said why
        return
    if why := obstacle or reform.obstacle():
        guard.cannot_heal(why)
        if os.environ.get(GUARD) and os.environ.get("RANK") == "0":
            _log.warning("ddp: after a failure all ranks will restart, not only the failed ones: %s", why)


def install() -> None:
    """Close the gate, once in a process that joins survivors, before the script creates groups.

    The launcher calls it when the process has imported torch, and the import of this module does, for other launchers.
    """
    if not _gate.closed or not status_page.once("joining"):
        return
    torch_api.patch(torch_names.NEW_GROUP, _announcing)
    for name in (torch_names.VERIFY_MODEL, torch_names.SYNC_STATES_OF_DDP):
        torch_api.patch(name, _skipping)
    torch_api.patch(torch_names.PRE_FORWARD, _refusing_forward)
    wrappers.watch_from_start()
    _gate.is_installed = True
    for group_class in _group_classes:
        _watch(group_class)


def watch(group_class: Any) -> None:
    """Let the methods of a group class in Python, too, refuse to communicate while the gate is closed."""
    _group_classes.append(group_class)
    if _gate.is_installed:
        _watch(group_class)


def _watch(group_class: Any) -> None:
    for name, facts in FACTS.items():
        original = group_class.__dict__.get(name)
        if callable(original):
            setattr(group_class, name, _refusing(original, name, facts.op))


# --- what the wrappers do --------------------------------------------------------------------------------


def _announcing(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def make_group(
        size: int, rank: int, ranks: list[int], backend: Any, store: Any, name: str, *args: Any, **kwargs: Any
    ) -> Any:
        if _gate.closed and _gate.has_resumed:
            _raise(f"{reform.LATE_GROUP} ({_line_of_script()})")
        if _gate.closed:
            members = tuple(ranks) or tuple(range(size))
            config = str(BackendConfig(Backend(str(backend))))
            _announce(Announced(str(name), members, config), store)
        return make(size, rank, ranks, backend, store, name, *args, **kwargs)

    return make_group


def _announce(group: Announced, store: Any) -> None:
    if _gate.meeting is None:
        _gate.meeting = Meeting(membership.own_store(store), int(os.environ["RANK"]))
    _gate.meeting.announce(group)


def _skipping(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def skipped(*args: Any, **kwargs: Any) -> Any:
        return None if is_alone() else original(*args, **kwargs)

    return skipped


def _refusing_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _pre_forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if _gate.closed:
            refuse("the forward of DistributedDataParallel")
        return original(self, *inputs, **kwargs)

    return _pre_forward


def _refusing(original: Callable[..., Any], name: str, op: str) -> Callable[..., Any]:
    def wrapper(group: Any, *args: Any, **kwargs: Any) -> Any:
        if not _gate.closed:
            return original(group, *args, **kwargs)
        if name in _BARRIERS:
            work = FinishedWork()
            work._tensors = []
            return work
        return refuse(f"dist.{op}")

    return copy_name(wrapper, original, name)


def refuse(what: str) -> None:
    """Raise, and tell the launcher, that the script communicates before it has joined the survivors."""
    reason = (
        f"the script communicates before state.run: {what} at {_line_of_script()}. The "
        "survivors of a failure do not take part in that. Move it into the function that state.run calls"
    )
    _raise(reason)


def _raise(reason: str) -> NoReturn:
    guard.cannot_heal(reason)
    raise JoiningError(reason)


def _line_of_script() -> str:
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith((*_LIBRARIES, "<")):
            return f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return "an unknown line"


install()
