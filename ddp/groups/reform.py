"""Form the process groups of a surviving process again, for the generation in its environment.

Theory of operation
-------------------
The launcher has paused this process: its groups were aborted, and it is outside of all collectives. Then it changed the
variables that depend on the place (RANK, WORLD_SIZE, MASTER_ADDR, ...). `reform` does what a new process does when its
script creates its groups, in the same order, with the same names, on the store of the new generation:

1. leave all old groups
2. connect to the new store
3. for each group: announce it, wait until its members have announced it, and form it
4. let wrapped models start again (`ddp.groups.wrappers`)

The members of a group of `shm` and `hier` are replaced in place, so the group stays the same object. If `ddp.init` has
chosen between the two, it is chosen again: `shm` becomes `hier` when the job gets a second node. Any other group gets a
successor (`ddp.groups.successors`). torch's `dist._reconfigure` is not used for this: the backends that have it
meet through the store with which the group was created, and that store ends with its generation.

Groups that the script created inside the function that `state.run` calls are only left: the script creates them again,
when it calls this function again. `joining.joined` marks where that function begins, or the resume before it. A group
that is created between the two is not created again, so it is an `obstacle`.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ddp.groups import membership, process_group, rank_info, registry, successors, wrappers
from ddp.groups.membership import Membership, let_go
from ddp.groups.rank_info import END, Announced, CannotReform, WorldPlace, objection, parse_rank_info
from ddp.groups.registry import Registered
from ddp.telemetry import collective_marks, guard

# --- where processes meet again --------------------------------------------------------------------
#
# Processes of a generation that was formed in place announce each group in its store before they form it.
#
# A survivor reads the announcements of a member until it finds the group that it wants to form. So it does not wait
# for a member that never forms this group.

_PREFIX = "ddp/formed"


class Meeting:
    """The announcements of one generation, as this rank writes and reads them."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store = PrefixStore(_PREFIX, membership.own_store(store))
        self._rank = rank
        self._said = 0
        self._read: dict[int, int] = {}  # by rank, how many announcements were read
        self._latest: dict[int, Announced] = {}

    def announce(self, group: Announced) -> None:
        self._store.set(f"{self._rank}/{self._said}", json.dumps(asdict(group)))
        self._said += 1

    def end(self) -> None:
        """Announce that this process forms no more groups of the world."""
        self.announce(Announced(END))

    def await_members(self, group: Announced, timeout_s: float, interrupted: Callable[[], str]) -> None:
        """Wait until all members are about to form the group. CannotReform: one of them does not form it.

        TimeoutError: a member has not arrived in time.
        """
        for rank in group.ranks:
            if rank != self._rank:
                self._await(rank, group, timeout_s, interrupted)

    def _await(self, rank: int, group: Announced, timeout_s: float, interrupted: Callable[[], str]) -> None:
        while True:
            theirs = self._next(rank, timeout_s, interrupted)
            if theirs.name in (group.name, END):
                break  # otherwise it is a group of which this process is not a member
        if problem := objection(group, rank, theirs):
            raise CannotReform(problem)

    def _next(self, rank: int, timeout_s: float, interrupted: Callable[[], str]) -> Announced:
        number = self._read.get(rank, 0)
        if self._latest.get(rank) == Announced(END):
            return self._latest[rank]
        key = f"{rank}/{number}"
        membership.await_keys(self._store, [key], timeout_s, interrupted)
        said = json.loads(self._store.get(key))
        self._read[rank] = number + 1
        self._latest[rank] = Announced(said["name"], tuple(said["ranks"]), said["backend"])
        return self._latest[rank]


# --- reform ----------------------------------------------------------------------------------------

__all__ = ["CannotReform", "is_reforming", "mark", "obstacle", "reform"]

_log = logging.getLogger("ddp")
# The launcher pauses or ends this process earlier if a member is lost.
_MEET_WITHIN_S = 600.0
_CONNECT_WITHIN = timedelta(seconds=60)
LATE_GROUP = (
    "the script creates a group between state.resume and state.run, where it cannot be formed again. Create it before "
    "state.resume, or in the function that state.run calls"
)


@dataclass(frozen=True, slots=True)
class _Mark:
    """The groups that the script created before it began to train."""

    names: frozenset[str]
    n_created: int


@dataclass(slots=True)
class _Work:
    """What is to be formed again. It is kept until all of it is formed: another failure may interrupt this."""

    groups: list[Registered]  # in the order of their creation
    before: WorldPlace
    n_created: int


_mark: _Mark | None = None
_work: _Work | None = None
_reforming = False


def mark() -> None:
    """Remember the groups of this process: `reform` forms these. Later ones are created again by the script."""
    global _mark
    if dist.is_initialized():
        _mark = _Mark(frozenset(each.name for each in registry.read()), registry.n_created())
    wrappers.watch()
    wrappers.remember()


def obstacle() -> str:
    """Say why this process cannot form its groups and models again, as far as it is known when it begins to train."""
    return LATE_GROUP if _has_late_groups() else wrappers.obstacle()


def _has_late_groups() -> bool:
    if _mark is None or not dist.is_initialized():
        return False
    return registry.n_created() != _mark.n_created or any(
        each.name not in _mark.names for each in registry.read()
    )


def is_reforming() -> bool:
    return _reforming


def reform() -> None:
    """Form all groups of this process again. Collective with the other survivors and with the replacements.

    CannotReform: this process must be replaced. Another error: a member was lost meanwhile, or the launcher has paused
    this process again; then call it again for the next generation.
    """
    global _reforming, _work
    began = time.monotonic()
    wrappers.find_unnoticed()  # now, while the replacements start
    _work = _work or _take_apart()
    if _work is None:
        return
    _reforming = True
    try:
        _form(_work, guard.why_broken)
        wrappers.renew_all()
    except RuntimeError as error:
        reason = guard.why_broken()
        if reason and not isinstance(error, CannotReform):
            raise dist.DistBackendError(reason) from error  # the launcher has cut the connection to the store
        raise
    finally:
        _reforming = False
    count, _work = len(_work.groups), None
    _log.info("ddp: formed %d groups again in %.0f ms", count, 1000 * (time.monotonic() - began))


def _take_apart() -> _Work | None:
    if not dist.is_initialized():
        return None
    known = registry.read()
    if not registry.is_from_environment():
        raise CannotReform(
            "the script gave init_process_group a store or an address of its own, and only the script knows where to "
            "meet again. Use init_method='env://' (the default), or ddp.init()"
        )
    default = next(each for each in known if each.is_default)
    before = WorldPlace(default.ranks.index(dist.get_rank()), len(default.ranks))
    if _mark is None:
        return _Work(known, before, registry.n_created())
    kept = [each for each in known if each.name in _mark.names]
    for each in known:
        if each not in kept:
            _leave(each)
    let_go(known)
    return _Work(kept, before, _mark.n_created)


def _leave(known: Registered) -> None:
    for old in successors.predecessors(known.group):
        registry.forget_stand_in(old)
    registry.forget(known)
    if isinstance(known.group, Membership):
        known.group.leave()
        return
    with suppress(RuntimeError):  # a backend that cannot be aborted
        known.group.abort()


def _form(work: _Work, interrupted: Callable[[], str]) -> None:
    info = parse_rank_info(os.environ)
    now = WorldPlace(info.rank, info.world_size)
    given = [
        rank_info.GroupMembers(
            each.name, each.ranks, is_split=each.device is not None and not each.is_default
        )
        for each in work.groups
    ]
    chosen = rank_info.new_groups(given, work.n_created, work.before, now)
    old: list[Any] = list(work.groups)
    for each in reversed(work.groups):
        _leave(each)
    backend = process_group.chosen_now()
    work.groups[:] = _choose_again(work.groups, backend)
    store: Any = next(rendezvous("env://", now.rank, now.size, timeout=_CONNECT_WITHIN))[0]
    meeting = Meeting(store, now.rank)
    for number, group in enumerate(chosen):
        known = work.groups[number]
        announced = Announced(group.name, group.ranks, known.config)
        meeting.announce(announced)
        meeting.await_members(announced, _MEET_WITHIN_S, interrupted)
        if known.is_default:
            store.set_timeout(known.timeout or dist.default_pg_timeout)
        under = registry.default_store(store) if known.is_default else registry.store_of_default()
        made = registry.form(known, group.ranks, now.rank, under, interrupted)
        work.groups[number] = _follow(known, made)
        del known, made
    let_go(old)
    meeting.end()
    registry.set_created(work.n_created)
    collective_marks.start_anew()
    process_group.moved(backend)
    if (our_guard := guard.running()) is not None:
        our_guard.wake()


def _choose_again(groups: list[Registered], backend: str) -> list[Registered]:
    """Let the groups of the backend that `ddp.init` has chosen use the one that it would choose now."""
    before = groups[0].backend
    if backend in ("", before) or not isinstance(groups[0].group, Membership):
        return groups
    ours = [each.backend == before and isinstance(each.group, Membership) for each in groups]
    return [
        registry.with_backend(each, backend) if mine else each
        for each, mine in zip(groups, ours, strict=True)
    ]


def _follow(known: Registered, made: Any) -> Registered:
    """Let a new group take the place of the old one, for everything that holds the old one."""
    if made is known.group:
        return known
    successors.set_successor(known.group, made)
    for each in successors.predecessors(made):
        registry.let_stand_for(each, made)
    return replace(known, group=made)
