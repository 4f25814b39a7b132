"""Notes on the page which collectives a script enters and leaves.

They are seen one level below `torch.distributed`'s functions, where all of these pass: at the methods of ProcessGroup,
and at Work.wait for those that go on by themselves. So `all_gather_object` shows as the two all-gathers that it is,
and what never passes there is not seen: the buckets of torch's own C++ reducer, and functional collectives.

A Work is over when it was waited for, when it is found completed by a later call, or when nobody holds it any more.
Nothing here keeps one alive, since it would keep its tensors.

torch asks a group written in Python whether it overrides a method, and tells by the name of the running code when it
is asked from inside that very override: so the wrappers run under the names of what they wrap.
"""

from __future__ import annotations

import functools
import os
import weakref
import zlib
from typing import TYPE_CHECKING, Any

from . import status_page
from .collective_facts import FACTS, spelled, tensor_facts
from .page_writer import LONGEST_NAME
from .status_page import COMMUNICATE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .collective_facts import Facts
    from .status_page import Page


_FORMING = "init_process_group"


def install(page: Page) -> None:
    from torch.distributed import is_available

    if not is_available():
        return
    from torch.distributed import ProcessGroup, Work

    marks = status_page.keep("collectives", _Marks(page))
    marks.watch_group_class(ProcessGroup)
    marks.watch_work_class(Work)
    _watch_names(ProcessGroup)


def _watch_names(group_class: Any) -> None:
    """Every group is given its name when it is made."""
    named = group_class._set_group_name

    @functools.wraps(named)
    def _set_group_name(group: Any, name: str) -> None:
        named(group, name)
        told = status_page.kept("made")
        if told is not None:
            told()

    group_class._set_group_name = _set_group_name


def note_forming(page: Page) -> None:
    """Of every group its timeout before it is formed: its ranks may come as late as that. And the forming counts as a
    collective of its ranks: those that have come wait there for one that never does."""
    from torch.distributed import distributed_c10d

    registry: Any = distributed_c10d
    make = registry._new_process_group_helper

    @functools.wraps(make)
    def make_group(*args: Any, **kwargs: Any) -> Any:
        timeout = kwargs.get("timeout")
        if timeout is not None:
            page.patience(timeout.total_seconds())
        op, ranks = _formed(*args) if status_page.traces_collectives() else ("", [])
        if len(ranks) < 2:
            return make(*args, **kwargs)
        before = page.mark(COMMUNICATE)
        ticket = page.enter(_those_who_form(page, op, ranks), op, "", 0, 0, -1, False, 0)
        try:
            made = make(*args, **kwargs)
        finally:
            page.phase(before)  # the start of a script is not over with this
        page.leave(ticket)  # where it fails the page goes on showing that it was here
        return made

    registry._new_process_group_helper = make_group


def _formed(
    size: int = -1, rank: int | None = -1, ranks_in_group: Sequence[int] | None = None, *_more: object
) -> tuple[str, list[int]]:
    """Of what ranks, by the launcher's numbers: of any others a page has nothing to say, nor has who is not in it."""
    from torch.distributed import get_rank, get_world_size, is_initialized

    ours = os.environ.get("WORLD_SIZE"), os.environ.get("RANK")
    if ranks_in_group == []:
        return _FORMING, list(range(size)) if (str(size), str(rank)) == ours else []
    known = is_initialized() and (str(get_world_size()), str(get_rank())) == ours
    return "new_group", sorted(ranks_in_group or ()) if known and rank is not None else []


def _those_who_form(page: Page, op: str, ranks: list[int]) -> int:
    """Always the same number, so that a group that is formed again is the next collective."""
    members = spelled(ranks)
    name = op if op == _FORMING else f"({members})"
    if len(name) > LONGEST_NAME:
        name = f"({members[:24]}... {zlib.crc32(members.encode()):08x})"
    known: dict[str, int] = status_page.kept("forming") or status_page.keep("forming", {})
    if name not in known:
        known[name] = page.group(name, len(ranks), members)
    return known[name]


def watch(group_class: type, work_classes: tuple[type, ...]) -> None:
    """A group in Python has methods of its own. Nothing happens where collectives are not noted."""
    marks = status_page.kept("collectives")
    if marks is not None:
        marks.watch_group_class(group_class)
        for work_class in work_classes:
            marks.watch_work_class(work_class)


def when_a_group_is_made(told: Callable[[], None]) -> None:
    status_page.keep("made", told)


def when_one_fails(told: Callable[[RuntimeError, str, int], None]) -> None:
    """`told(error, op, seq)` for each collective that raises; it may raise another in its place."""
    status_page.keep("failures", told)


class _Flight:
    """A collective between its call and its end."""

    __slots__ = ("op", "sequence", "ticket", "work")

    def __init__(self, ticket: int, op: str, sequence: int) -> None:
        self.ticket, self.op, self.sequence = ticket, op, sequence
        self.work: weakref.ref[Any] | None = None


def _tell(error: RuntimeError, flight: _Flight) -> None:
    status_page.page().error(f"{flight.op} #{flight.sequence}: {error}")
    told = status_page.kept("failures")
    if told is not None:
        told(error, flight.op, flight.sequence)


class _Group:
    __slots__ = ("entered", "inside", "number", "pairs", "ranks", "reference")

    def __init__(self, group: Any, page: Page) -> None:
        self.reference = weakref.ref(group)
        self.entered = 0
        self.inside = False
        self.pairs: dict[tuple[str, int], int] = {}
        name, self.ranks = _name(group), _ranks(group)
        self.number = page.group(name, group.size(), spelled(self.ranks))


def _name(group: Any) -> str:
    try:
        return str(group.group_name)
    except (RuntimeError, AttributeError):  # a group that was made without torch.distributed's register
        return "unnamed"


def _ranks(group: Any) -> list[int]:
    from torch.distributed import get_process_group_ranks

    try:
        return get_process_group_ranks(group)
    except (RuntimeError, KeyError, ValueError):
        return []


class _Marks:
    def __init__(self, page: Page) -> None:
        self._page = page
        self._groups: dict[int, _Group] = {}
        self._flying: dict[int, _Flight] = {}  # by the identity of the Work
        self._futures: list[tuple[Any, int]] = []

    # --- a collective begins -------------------------------------------------------------------------

    def watch_group_class(self, group_class: type) -> None:
        for name, facts in FACTS.items():
            original = group_class.__dict__.get(name)
            if callable(original):
                setattr(group_class, name, self._noted(original, name, facts))

    def _noted(self, original: Callable[..., Any], name: str, facts: Facts) -> Callable[..., Any]:
        marks = self

        def noted(group: Any, *args: Any, **kwargs: Any) -> Any:
            return marks.call(original, facts, group, args, kwargs)

        return _in_the_place_of(original, noted, name)

    def call(
        self,
        original: Callable[..., Any],
        facts: Facts,
        group: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        page = self._page
        at_once = not getattr(args[-1] if args else kwargs.get("opts"), "asyncOp", True)
        known = self._known(group)
        if known.inside:  # it is built of its other methods; what it was asked for counts
            return original(group, *args, **kwargs)
        flight = self._enter(facts, known, args, not at_once)
        before = page.mark(COMMUNICATE) if at_once else COMMUNICATE
        known.inside = True
        try:
            work = original(group, *args, **kwargs)
        except RuntimeError as error:
            _tell(error, flight)
            raise
        finally:
            known.inside = False
            if at_once:
                page.back(before)
        if work is None:
            page.leave(flight.ticket)
        else:
            self._fly(work, flight)
        return work

    def _known(self, group: Any) -> _Group:
        known = self._groups.get(id(group))
        if known is None or known.reference() is not group:
            known = self._groups[id(group)] = _Group(group, self._page)
        return known

    def _enter(self, facts: Facts, known: _Group, args: tuple[Any, ...], is_async: bool) -> _Flight:
        if self._flying or self._futures:
            self._look_at_the_oldest()
        dtype, numel, shape, peer, pair = "", 0, 0, -1, 0
        try:
            if facts.alike is not None:
                dtype, numel, shape = tensor_facts(args[facts.alike])
            if facts.root:
                peer = known.ranks[args[1].rootRank]
            elif facts.peer is not None:
                peer = known.ranks[args[facts.peer]]
                pair = known.pairs[facts.op, peer] = known.pairs.get((facts.op, peer), 0) + 1
        except (IndexError, AttributeError, TypeError):
            pass  # called in a way of its own: what can be told is told
        known.entered += not pair
        ticket = self._page.enter(known.number, facts.op, dtype, numel, shape, peer, is_async, pair)
        return _Flight(ticket, facts.op, pair or known.entered)

    # --- and is over ---------------------------------------------------------------------------------

    def _fly(self, work: Any, flight: _Flight) -> None:
        key = id(work)

        def nobody_holds_it(_reference: object) -> None:
            if self._flying.pop(key, None) is not None:
                self._page.leave(flight.ticket)

        flight.work = weakref.ref(work, nobody_holds_it)
        self._flying[key] = flight

    def _look_at_the_oldest(self) -> None:
        if self._flying:
            key = next(iter(self._flying))
            flight = self._flying[key]
            work = flight.work() if flight.work is not None else None
            if work is not None and work.is_completed():
                del self._flying[key]
                self._page.leave(flight.ticket)
        while self._futures and self._futures[0][0].done():
            self._page.leave(self._futures.pop(0)[1])

    def watch_work_class(self, work_class: type) -> None:
        for name, by in (("wait", self.wait), ("get_future", self.future)):
            original = work_class.__dict__.get(name)
            if callable(original):
                setattr(work_class, name, _noting(original, name, by))

    def wait(self, original: Callable[..., Any], work: Any, args: Any, kwargs: Any) -> Any:
        flight = self._flying.pop(id(work), None)
        if flight is None:
            return original(work, *args, **kwargs)
        page = self._page
        before = page.mark(COMMUNICATE)
        try:
            result = original(work, *args, **kwargs)
        except RuntimeError as error:  # and the page goes on showing where
            _tell(error, flight)
            raise
        finally:
            page.back(before)
        page.leave(flight.ticket)
        return result

    def future(self, original: Callable[..., Any], work: Any, args: Any, kwargs: Any) -> Any:
        """Who asks for a future often lets go of the Work."""
        future = original(work, *args, **kwargs)
        flight = self._flying.pop(id(work), None)
        if flight is not None:
            self._futures.append((future, flight.ticket))
        return future


def _noting(original: Callable[..., Any], name: str, by: Callable[..., Any]) -> Callable[..., Any]:
    def noted(work: Any, *args: Any, **kwargs: Any) -> Any:
        return by(original, work, args, kwargs)

    return _in_the_place_of(original, noted, name)


def _in_the_place_of(original: Callable[..., Any], noted: Any, name: str) -> Callable[..., Any]:
    noted.__code__ = noted.__code__.replace(co_name=name)
    wrapper: Callable[..., Any] = functools.update_wrapper(noted, original)
    return wrapper
