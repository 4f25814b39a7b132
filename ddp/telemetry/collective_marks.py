"""Record on the status page which collectives a script enters and leaves.

All calls of `torch.distributed` go through the methods of ProcessGroup, and asynchronous calls through Work.wait. These
methods are wrapped here. So `all_gather_object` shows as the two all-gathers of which it consists. The buckets of
torch's own C++ reducer and functional collectives do not use them and are not recorded.

A collective ends when the script has waited for its Work, when a later call finds the Work completed, or when the Work
has been deleted. Nothing here keeps a Work alive, because that would keep its tensors alive as well. A captured
collective ends at once: it runs when the CUDA graph is replayed, which calls nothing here.

For a group written in Python, torch checks whether the group overrides a method, and takes an inherited wrapper for an
override. It recognizes a call from the override itself by the running frame: the name of its code object, and its first
argument. So a wrapper has the name of the method that it wraps, and calls the method itself, not through another
function. Otherwise the two would call each other without end.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import weakref
import zlib
from typing import TYPE_CHECKING, Any

from . import capture, status_page, torch_api, torch_names
from .collective_facts import FACTS, format_ranks, given_timeout_s, tensor_facts
from .page_layout import LONGEST_NAME
from .status_page import COMMUNICATE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .collective_facts import Facts
    from .status_page import Page


_OUR_BACKENDS = ("shm", "hier")
_FORMING = "init_process_group"


def install(page: Page) -> None:
    from torch.distributed import is_available

    if not is_available():
        return
    from torch.distributed import ProcessGroup, Work

    marks = status_page.keep("collectives", _Marks(page))
    marks.watch_group_class(ProcessGroup)
    marks.watch_work_class(Work)
    for group_class, work_classes in _own_classes():
        marks.watch_classes(group_class, work_classes)
    _watch_names()


def _watch_names() -> None:
    """Detect new groups: torch names every group when it creates it."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _set_group_name(group: Any, name: str) -> None:
            original(group, name)
            callback = status_page.kept("on_new_group")
            if callback is not None:
                callback()

        return _set_group_name

    with contextlib.suppress(AttributeError):  # the warning says what this torch lacks
        torch_api.patch(torch_names.SET_GROUP_NAME, wrap)


def mark_group_creation(page: Page) -> None:
    """Record the creation of groups as a collective of their ranks, since ranks may wait there for one that is missing.

    The timeout that the script gives the group is recorded before the group is created, because a rank may wait up to
    this timeout for the others.
    """

    def wrap(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            try:
                return make(*args, **kwargs)
            except Exception as error:
                _explain_backend(error, *args)
                raise

        @functools.wraps(make)
        def make_group(*args: Any, **kwargs: Any) -> Any:
            page.group_timeout(given_timeout_s(kwargs.get("timeout")))
            op, ranks = _creation(*args) if status_page.traces_collectives() else ("", [])
            if len(ranks) < 2:
                return made(*args, **kwargs)
            before = page.mark(COMMUNICATE)
            ticket = page.enter(_creators(page, op, ranks), op, "", 0, 0, -1, False, 0)
            try:
                group = made(*args, **kwargs)
            finally:
                page.phase(before)  # a script that starts is still starting after this
            page.leave(ticket)  # not after an error: the page keeps showing where the rank was
            return group

        return make_group

    torch_api.patch(torch_names.NEW_GROUP, wrap)


def _explain_backend(error: Exception, *creation: object) -> None:
    """torch says "Unknown backend type shm", and nothing about the import that registers it."""
    backend = str(creation[3]) if len(creation) > 3 else ""
    if backend in _OUR_BACKENDS and "ddp.shm" not in sys.modules:
        error.add_note(f'"{backend}" is a backend of ddp-launch. Add `import ddp.shm` before this call.')


def _creation(
    size: int = -1, rank: int | None = -1, ranks_in_group: Sequence[int] | None = None, *_more: object
) -> tuple[str, list[int]]:
    """Return the function and the ranks in the launcher's numbering.

    The list is empty if the ranks are unknown or this rank is not a member.
    """
    from torch.distributed import get_rank, get_world_size, is_initialized

    ours = os.environ.get("WORLD_SIZE"), os.environ.get("RANK")
    if ranks_in_group == []:
        return _FORMING, list(range(size)) if (str(size), str(rank)) == ours else []
    known = is_initialized() and (str(get_world_size()), str(get_rank())) == ours
    return "new_group", sorted(ranks_in_group or ()) if known and rank is not None else []


def _creators(page: Page, op: str, ranks: list[int]) -> int:
    """Return the group number on the status page:

    the same for the same ranks, so that the next creation continues its count.
    """
    members = format_ranks(ranks)
    name = op if op == _FORMING else f"({members})"
    if len(name) > LONGEST_NAME:
        name = f"({members[:24]}... {zlib.crc32(members.encode()):08x})"
    known: dict[str, int] = status_page.kept("forming") or status_page.keep("forming", {})
    if name not in known:
        known[name] = page.group(name, len(ranks), members)
    return known[name]


def watch(group_class: type, work_classes: tuple[type, ...]) -> None:
    """Record the collectives of a group class written in Python, which has its own methods, if tracing is on.

    A process that was forked after the import of the class installs its marks later.
    """
    if any(group_class is each for each, _work_classes in _own_classes()):
        return
    _own_classes().append((group_class, work_classes))
    marks = status_page.kept("collectives")
    if marks is not None:
        marks.watch_classes(group_class, work_classes)


def _own_classes() -> list[tuple[type, tuple[type, ...]]]:
    known: list[tuple[type, tuple[type, ...]]] | None = status_page.kept("own group classes")
    return known if known is not None else status_page.keep("own group classes", [])


def start_anew() -> None:
    """Forget the collectives before this: the groups have other members now, who count theirs from 0."""
    marks = status_page.kept("collectives")
    if marks is not None:
        marks.start_anew()


def on_new_group(callback: Callable[[], None]) -> None:
    status_page.keep("on_new_group", callback)


def on_failure(callback: Callable[[RuntimeError, str, int], None]) -> None:
    """Call `callback(error, op, sequence)` for each collective that raises; it may raise another error instead."""
    status_page.keep("on_failure", callback)


class _Flight:
    """A collective between its start and its end."""

    __slots__ = ("before", "group", "op", "sequence", "ticket", "work")

    def __init__(self, group: _Group, ticket: int, op: str, sequence: int) -> None:
        self.group, self.ticket, self.op, self.sequence = group, ticket, op, sequence
        self.before: int | None = None  # the phase before a blocking call
        self.work: weakref.ref[Any] | None = None


def _report(error: RuntimeError, flight: _Flight) -> None:
    status_page.page().error(f"{flight.op} #{flight.sequence}: {error}")
    callback = status_page.kept("on_failure")
    if callback is not None:
        callback(error, flight.op, flight.sequence)


class _Group:
    __slots__ = ("entered", "inside", "number", "pairs", "ranks", "reference")

    def __init__(self, group: Any, page: Page) -> None:
        self.reference = weakref.ref(group)
        self.entered = 0
        self.inside = False
        self.pairs: dict[tuple[str, int], int] = {}
        name, self.ranks = _name(group), _ranks(group)
        self.number = page.group(name, group.size(), format_ranks(self.ranks))


def _name(group: Any) -> str:
    try:
        return str(group.group_name)
    except (RuntimeError, AttributeError):  # a group that was created without torch.distributed's registry
        return "unnamed"


def _ranks(group: Any) -> list[int]:
    from torch.distributed import get_process_group_ranks

    try:
        return get_process_group_ranks(group)
    except (RuntimeError, KeyError, ValueError):
        return []


class _Marks:
    """The collectives of this process that have started and not ended."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._groups: dict[int, _Group] = {}
        self._flying: dict[int, _Flight] = {}  # by the identity of the Work
        self._futures: list[tuple[Any, int]] = []

    def start_anew(self) -> None:
        """Count the collectives of all groups from 0 again, as a process does that has just started."""
        self._groups.clear()
        self._flying.clear()
        self._futures.clear()
        self._page.forget()

    # --- start of a collective -----------------------------------------------------------------------

    def watch_classes(self, group_class: type, work_classes: tuple[type, ...]) -> None:
        self.watch_group_class(group_class)
        for work_class in work_classes:
            self.watch_work_class(work_class)

    def watch_group_class(self, group_class: type) -> None:
        for name, facts in FACTS.items():
            original = group_class.__dict__.get(name)
            if callable(original):
                setattr(group_class, name, self._wrap_collective(original, name, facts))

    def _wrap_collective(self, original: Callable[..., Any], name: str, facts: Facts) -> Callable[..., Any]:
        begin, returned = self._begin, self._returned

        def wrapper(group: Any, *args: Any, **kwargs: Any) -> Any:
            flight = begin(facts, group, args, kwargs)
            if flight is None:
                return original(group, *args, **kwargs)
            try:
                work = original(group, *args, **kwargs)
            except RuntimeError as error:
                _report(error, flight)
                raise
            finally:
                returned(flight)
            self._track(work, flight)
            return work

        return copy_name(wrapper, original, name)

    def _begin(
        self, facts: Facts, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Flight | None:
        """Return None inside another collective: a group calls its own methods, and only the outer call is recorded."""
        known = self._known(group)
        if known.inside:
            return None
        is_blocking = not getattr(args[-1] if args else kwargs.get("opts"), "asyncOp", True)
        if facts.timeout:
            self._page.group_timeout(given_timeout_s(args[0] if args else kwargs.get("opts")))
        flight = self._enter(facts, known, args, not is_blocking)
        if is_blocking:
            flight.before = self._page.mark(COMMUNICATE)
        known.inside = True
        return flight

    def _returned(self, flight: _Flight) -> None:
        flight.group.inside = False
        if flight.before is not None:
            self._page.back(flight.before)

    def _known(self, group: Any) -> _Group:
        known = self._groups.get(id(group))
        if known is None or known.reference() is not group:
            known = self._groups[id(group)] = _Group(group, self._page)
        return known

    def _enter(self, facts: Facts, known: _Group, args: tuple[Any, ...], is_async: bool) -> _Flight:
        if self._flying or self._futures:
            self._check_oldest()
        dtype, numel, shape, peer, pair = "", 0, 0, -1, 0
        try:
            if facts.matching is not None:
                dtype, numel, shape = tensor_facts(args[facts.matching])
            if facts.root:
                peer = known.ranks[args[1].rootRank]
            elif facts.peer is not None:
                peer = known.ranks[args[facts.peer]]
                pair = known.pairs[facts.op, peer] = known.pairs.get((facts.op, peer), 0) + 1
        except (IndexError, AttributeError, TypeError):
            pass  # unusual arguments: record the facts that are known
        known.entered += not pair
        ticket = self._page.enter(known.number, facts.op, dtype, numel, shape, peer, is_async, pair)
        return _Flight(known, ticket, facts.op, pair or known.entered)

    # --- end of a collective -------------------------------------------------------------------------

    def _track(self, work: Any, flight: _Flight) -> None:
        if work is None or capture.is_capturing():
            # Work that is captured has no end to wait for. To ask for it, even later, would be an error of the device.
            self._page.leave(flight.ticket)
            return
        key = id(work)

        def on_deletion(_reference: object) -> None:
            if self._flying.pop(key, None) is not None:
                self._page.leave(flight.ticket)

        flight.work = weakref.ref(work, on_deletion)
        self._flying[key] = flight

    def _check_oldest(self) -> None:
        if capture.is_capturing():  # a question to the device would break the capture
            return
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
        for name, handler in (("wait", self.wait), ("get_future", self.future)):
            original = work_class.__dict__.get(name)
            if callable(original):
                setattr(work_class, name, _wrap_work_method(original, name, handler))

    def wait(self, original: Callable[..., Any], work: Any, args: Any, kwargs: Any) -> Any:
        flight = self._flying.pop(id(work), None)
        if flight is None:
            return original(work, *args, **kwargs)
        page = self._page
        before = page.mark(COMMUNICATE)
        try:
            result = original(work, *args, **kwargs)
        except RuntimeError as error:  # no leave(): the page keeps showing where the rank was
            _report(error, flight)
            raise
        finally:
            page.back(before)
        page.leave(flight.ticket)
        return result

    def future(self, original: Callable[..., Any], work: Any, args: Any, kwargs: Any) -> Any:
        """Track the future instead of the Work: callers of get_future() often drop the Work."""
        future = original(work, *args, **kwargs)
        flight = self._flying.pop(id(work), None)
        if flight is not None:
            self._futures.append((future, flight.ticket))
        return future


def _wrap_work_method(
    original: Callable[..., Any], name: str, handler: Callable[..., Any]
) -> Callable[..., Any]:
    def wrapper(work: Any, *args: Any, **kwargs: Any) -> Any:
        return handler(original, work, args, kwargs)

    return copy_name(wrapper, original, name)


def copy_name(wrapper: Any, original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Give a wrapper the name of the method that it wraps, for torch's check of overrides."""
    wrapper.__code__ = wrapper.__code__.replace(co_name=name)
    result: Callable[..., Any] = functools.update_wrapper(wrapper, original)
    return result
