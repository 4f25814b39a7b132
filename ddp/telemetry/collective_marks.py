"""Record on the status page which collectives a script enters and leaves.

All calls of `torch.distributed` go through the methods of ProcessGroup, and asynchronous calls through Work.wait. These
methods are wrapped here. So `all_gather_object` shows as the two all-gathers of which it consists. The buckets of
torch's own C++ reducer and functional collectives do not use them and are not recorded.

A collective ends when the script has waited for its Work, or when the Work has been deleted. If the script has asked
for the future of the Work, it ends when a later call finds this future completed. Nothing here keeps a Work alive,
because that would keep its tensors alive as well, and nothing asks a Work whether it is completed: while a CUDA graph
is captured, such a question is an error of the device.

Several threads may communicate at the same time, each in groups of its own. What they share here changes only by single
operations of a dictionary, a set or a deque, which are atomic.

For a group written in Python, torch checks whether the group overrides a method, and takes an inherited wrapper for an
override. It recognizes a call from the override itself by the running frame: the name of its code object, and its first
argument. So a wrapper has the name of the method that it wraps, and calls the method itself, not through another
function. Otherwise the two would call each other without end.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise
from math import prod
from threading import get_ident
from typing import TYPE_CHECKING, Any

from . import status_page, torch_api, torch_names
from .observing import Observer
from .status_page import COMMUNICATE

if TYPE_CHECKING:
    from .status_page import Page

# --- facts of a collective -------------------------------------------------------------------------
#
# The properties of a collective that must be the same on all ranks, read from its arguments.
#
# Only tensors that must match on all ranks are read: the input of a gather, the output of a scatter. An all-to-all
# has no such tensor, because all its tensors may differ from rank to rank.


@dataclass(frozen=True, slots=True)
class CallFacts:
    op: str
    matching: int | None = None  # index of the argument with the tensors that must match on all ranks
    root: bool = False  # all other ranks wait for one root rank
    peer: int | None = None  # index of the argument with the rank on the other side
    timeout: bool = False  # the first argument is, or has, a timeout of this call


# By method of ProcessGroup; no version of torch has all of them.
FACTS: dict[str, CallFacts] = {
    "allreduce": CallFacts("all_reduce", 0),
    "allreduce_coalesced": CallFacts("all_reduce", 0),
    "ddp_average": CallFacts("all_reduce", 0),
    "allgather": CallFacts("all_gather", 1),
    "allgather_coalesced": CallFacts("all_gather", 1),
    "all_gather_single": CallFacts("all_gather", 1),
    "all_gather_single_coalesced": CallFacts("all_gather", 1),
    "_allgather_base": CallFacts("all_gather", 1),
    "allgather_into_tensor_coalesced": CallFacts("all_gather", 1),
    "reduce": CallFacts("reduce", 0),
    "reduce_scatter": CallFacts("reduce_scatter", 0),
    "reduce_scatter_single": CallFacts("reduce_scatter", 0),
    "reduce_scatter_single_coalesced": CallFacts("reduce_scatter", 0),
    "_reduce_scatter_base": CallFacts("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced": CallFacts("reduce_scatter", 0),
    "broadcast": CallFacts("broadcast", 0, root=True),
    "gather": CallFacts("gather", 1),
    "gather_single": CallFacts("gather", 1),
    "gather_into_tensor": CallFacts("gather", 1),
    "scatter": CallFacts("scatter", 0),
    "alltoall": CallFacts("all_to_all"),
    "alltoall_base": CallFacts("all_to_all"),
    "all_to_all_single": CallFacts("all_to_all"),
    "barrier": CallFacts("barrier", timeout=True),
    "monitored_barrier": CallFacts("monitored_barrier", timeout=True),
    "send": CallFacts("send", 0, peer=1),
    "recv": CallFacts("recv", 0, peer=1),
    "recv_anysource": CallFacts("recv", 0),
}


def given_timeout_s(given: Any) -> float:
    """Return a timeout that the script has given, otherwise 0. torch's defaults are objects of their own.

    `given`: the timeout, or options that contain it.
    """
    from torch.distributed import constants

    timeout = getattr(given, "timeout", given)
    defaults = (constants.default_pg_timeout, constants.default_pg_nccl_timeout)
    is_given = isinstance(timeout, timedelta) and not any(timeout is default for default in defaults)
    return timedelta.total_seconds(timeout) if is_given else 0.0


@functools.cache
def options_with_mode() -> frozenset[type]:
    """The classes of torch's options that say whether a call returns only when it is done."""
    from torch.distributed import distributed_c10d

    options = (getattr(distributed_c10d, name) for name in dir(distributed_c10d) if name.endswith("Options"))
    return frozenset(each for each in options if isinstance(each, type) and hasattr(each, "asyncOp"))


NO_FACTS = ("", 0, 0)
UNKNOWN = "?"  # the dtype of tensors that are not torch's own
_dtypes: dict[Any, str] = {}


def tensor_facts(held: Any) -> tuple[str, int, int]:
    """Return dtype, number of elements and hash of the shapes, for one tensor or for a list of tensors.

    No code of the script runs here: neither a class that inherits from torch's Tensor nor a mode of torch notices.
    """
    torchs = _torchs()
    if type(held) in (list, tuple):
        if len(held) != 1:
            return _facts_of_all(held, torchs) if held else NO_FACTS
        held = held[0]
    kind = torchs.tensor
    if type(held) is kind:
        with torchs.without_overrides():
            dtype, numel, shape = held.dtype, held.numel(), held.shape
    elif _is_plain(held, kind):
        with torchs.without_overrides():
            dtype, numel, shape = kind.dtype.__get__(held), kind.numel(held), kind.shape.__get__(held)
    else:
        return UNKNOWN, 0, 0
    name = _dtypes.get(dtype)
    if name is None:
        name = _dtypes[dtype] = str(dtype).removeprefix("torch.")
    return name, numel, hash(shape) & 0xFFFFFFFF


def _facts_of_all(tensors: Sequence[Any], torchs: _Torchs) -> tuple[str, int, int]:
    kind = torchs.tensor
    if not all(_is_plain(tensor, kind) for tensor in tensors):
        return UNKNOWN, 0, 0
    with torchs.without_overrides():
        shapes = tuple(kind.shape.__get__(tensor) for tensor in tensors)
    return tensor_facts(tensors[0])[0], sum(map(prod, shapes)), hash(shapes) & 0xFFFFFFFF


def _is_plain(tensor: Any, kind: Any) -> bool:
    """Whether its properties are those of its C++ object: a class with a `__torch_dispatch__` may compute them."""
    own = type(tensor)
    return any(each is kind for each in own.__mro__) and own.__torch_dispatch__ is kind.__torch_dispatch__


@dataclass(frozen=True, slots=True)
class _Torchs:
    tensor: Any
    without_overrides: Any


@functools.cache
def _torchs() -> _Torchs:
    from torch import Tensor

    return _Torchs(Tensor, torch_api.get(torch_names.WITHOUT_OVERRIDES))


def format_ranks(ranks: Sequence[int]) -> str:
    """Format 0,1,2,3 as "0-3", 0,2,4 as "0-4/2", and all others one by one."""
    if len(ranks) > 1:
        step = ranks[1] - ranks[0]
        if step > 0 and all(b - a == step for a, b in pairwise(ranks)):
            return f"{ranks[0]}-{ranks[-1]}" + (f"/{step}" if step > 1 else "")
    return ",".join(map(str, ranks))


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 0-3"."""
    return f"rank{'s' * (len(ranks) > 1)} {format_ranks(ranks)}"


# --- calls on the page -----------------------------------------------------------------------------

_FAILED = object()  # what a call returns that raises


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

    def named(_state: object) -> None:
        callback = status_page.kept("on_new_group")
        if callback is not None:
            callback()

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        return Observer("the search for lost peers").around(original, lambda _args, _kwargs: True, named)

    with contextlib.suppress(AttributeError):  # the warning says what this torch lacks
        torch_api.patch(torch_names.SET_GROUP_NAME, wrap)


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


def on_failure(callback: Callable[[RuntimeError, str, int], Exception | None]) -> None:
    """Call `callback(error, op, sequence)` for each collective that raises; what it returns is raised instead."""
    status_page.keep("on_failure", callback)


class _Flight:
    """A collective between its start and its end. Once it has a Work, `key` is the identity of that."""

    __slots__ = ("before", "group", "key", "op", "sequence", "ticket", "work")
    key: int
    work: weakref.ref[Any]

    def __init__(self, group: _Group, ticket: int, op: str, sequence: int) -> None:
        self.group, self.ticket, self.op, self.sequence = group, ticket, op, sequence
        self.before: int | None = None  # the phase before a blocking call


def _report(error: RuntimeError, flight: _Flight) -> Exception | None:
    status_page.page().error(f"{flight.op} #{flight.sequence}: {error}")
    callback = status_page.kept("on_failure")
    return callback(error, flight.op, flight.sequence) if callback is not None else None


class _Group:
    __slots__ = ("count", "inside", "number", "pairs", "ranks", "reference")

    def __init__(self, group: Any, page: Page, forget: Callable[[object], object]) -> None:
        self.reference = weakref.ref(group, forget)
        self.count = itertools.count(1)
        self.inside: set[int] = set()  # threads
        self.pairs: dict[tuple[str, int], Iterator[int]] = {}
        name, self.ranks = _name(group), _ranks(group)
        self.number = page.group(name, group.size(), format_ranks(self.ranks))

    def other_side(self, facts: CallFacts, args: tuple[Any, ...]) -> tuple[int, int]:
        """Return the root or peer, and the number of this call among those with this peer; 0: it has a root."""
        if facts.peer is None:
            return self.ranks[args[1].rootRank], 0
        peer = self.ranks[args[facts.peer]]
        return peer, next(self.pairs.setdefault((facts.op, peer), itertools.count(1)))


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
        self._observer = Observer("the record of collectives")
        self._failures = Observer("the explanation of failed collectives")
        self._groups: dict[int, _Group] = {}
        self._meeting = threading.RLock()
        self._flying: dict[int, _Flight] = {}  # by the identity of the Work
        self._futures: deque[tuple[Any, int]] = deque()
        self._options = options_with_mode()
        self._future_class: Any = torch_api.get(torch_names.FUTURE)

    def start_anew(self) -> None:
        """Count the collectives of all groups from 0 again, as a process does that has just started."""
        self._groups.clear()
        self._flying.clear()
        self._futures.clear()
        self._page.forget()

    def watch_classes(self, group_class: type, work_classes: tuple[type, ...]) -> None:
        self.watch_group_class(group_class)
        for work_class in work_classes:
            self.watch_work_class(work_class)

    def watch_group_class(self, group_class: type) -> None:
        for name, facts in FACTS.items():
            self._wrap(group_class, name, partial(self._begin, facts), self._returned)

    def watch_work_class(self, work_class: type) -> None:
        self._wrap(work_class, "wait", self._wait, self._waited)
        self._wrap(work_class, "get_future", self._asks_future, self._has_future)

    def _wrap(
        self, owner: type, name: str, begin: Callable[..., _Flight | None], end: Callable[..., None]
    ) -> None:
        original = owner.__dict__.get(name)
        if not callable(original):
            return
        observer, failures = self._observer, self._failures

        def wrapper(subject: Any, /, *args: Any, **kwargs: Any) -> Any:
            flight = None
            if observer.is_on:
                try:
                    flight = begin(subject, args, kwargs)
                except Exception as error:
                    observer.fail(error)
            if flight is None:
                return original(subject, *args, **kwargs)
            result: Any = _FAILED
            try:
                result = original(subject, *args, **kwargs)
            except RuntimeError as error:
                explained = failures.run(_report, error, flight)
                if explained is not None:
                    raise explained from error
                raise
            finally:
                try:
                    end(flight, result)
                except Exception as error:
                    observer.fail(error)
            return result

        setattr(owner, name, copy_name(wrapper, original, name))

    # --- start of a collective -----------------------------------------------------------------------

    def _begin(
        self, facts: CallFacts, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Flight | None:
        """Return None inside another collective: a group calls its own methods, and only the outer call is recorded."""
        known = self._groups.get(id(group))
        if known is None or known.reference() is not group:
            known = self._meet(group)
        thread = get_ident()
        if thread in known.inside:
            return None
        options: Any = kwargs["opts"] if "opts" in kwargs else args[-1] if args else None
        is_blocking = type(options) in self._options and not options.asyncOp
        if facts.timeout:
            self._page.group_timeout(given_timeout_s(args[0] if args else options))
        flight = self._enter(facts, known, args, not is_blocking)
        known.inside.add(thread)
        if is_blocking:
            flight.before = self._page.mark(COMMUNICATE)
        return flight

    def _meet(self, group: Any) -> _Group:
        groups, key = self._groups, id(group)
        with self._meeting:
            known = groups.get(key)
            if known is None or known.reference() is not group:
                known = groups[key] = _Group(group, self._page, lambda _gone: groups.pop(key, None))
        return known

    def _enter(self, facts: CallFacts, known: _Group, args: tuple[Any, ...], is_async: bool) -> _Flight:
        if self._futures:
            self._end_futures()
        (dtype, numel, shape), peer, pair = NO_FACTS, -1, 0
        if facts.matching is not None:
            dtype, numel, shape = tensor_facts(args[facts.matching] if len(args) > facts.matching else None)
        if facts.root or facts.peer is not None:
            try:
                peer, pair = known.other_side(facts, args)
            except (IndexError, AttributeError, TypeError):
                pass  # unusual arguments: record the facts that are known
        sequence = pair or next(known.count)
        ticket = self._page.enter(known.number, facts.op, dtype, numel, shape, peer, is_async, pair)
        return _Flight(known, ticket, facts.op, sequence)

    # --- end of a collective -------------------------------------------------------------------------

    def _returned(self, flight: _Flight, work: Any) -> None:
        flight.group.inside.discard(get_ident())
        if flight.before is not None:
            self._page.back(flight.before)
        if work is None:
            self._page.leave(flight.ticket)
        elif work is not _FAILED:  # no leave(): the page keeps showing where the rank was
            self._track(work, flight)

    def _track(self, work: Any, flight: _Flight) -> None:
        key = flight.key = id(work)

        def on_deletion(_reference: object) -> None:
            try:
                if self._flying.pop(key, None) is not None:
                    self._page.leave(flight.ticket)
            except Exception as error:
                self._observer.fail(error)

        flight.work = weakref.ref(work, on_deletion)
        if self._flying.setdefault(key, flight) is not flight:  # the group returns one Work for several calls
            self._page.leave(flight.ticket)

    def _end_futures(self) -> None:
        """End the collectives whose futures are completed. Another thread may do the same."""
        try:
            while True:
                oldest = self._futures.popleft()
                if not self._future_class.done(oldest[0]):
                    self._futures.appendleft(oldest)
                    return
                self._page.leave(oldest[1])
        except IndexError:
            pass

    def _wait(self, work: Any, _args: Any, _kwargs: Any) -> _Flight | None:
        flight = self._flying.pop(id(work), None)
        if flight is not None:
            flight.before = self._page.mark(COMMUNICATE)
        return flight

    def _waited(self, flight: _Flight, result: Any) -> None:
        assert flight.before is not None
        self._page.back(flight.before)
        if result is not _FAILED:
            self._page.leave(flight.ticket)

    def _asks_future(self, work: Any, _args: Any, _kwargs: Any) -> _Flight | None:
        return self._flying.get(id(work))

    def _has_future(self, flight: _Flight, future: Any) -> None:
        """Track the future instead of the Work: callers of get_future() often drop the Work."""
        if isinstance(future, self._future_class) and self._flying.pop(flight.key, None) is not None:
            self._futures.append((future, flight.ticket))


def copy_name(wrapper: Any, original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Give a wrapper the name of the method that it wraps, for torch's check of overrides."""
    wrapper.__code__ = wrapper.__code__.replace(co_name=name)
    result: Callable[..., Any] = functools.update_wrapper(wrapper, original)
    return result
