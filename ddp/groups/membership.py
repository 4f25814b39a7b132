"""The members of a shared group: its rank, its size, the core that connects them, and the backends beside the core.

All of this can be replaced while the group object stays, so that everything that holds the group goes on:

    form_again     for a new generation: the members meet through its store. `ddp.groups.reform` calls it
    use            before it: the other one of the backends `shm` and `hier`, if the world has another number of hosts
    reconfigure    the interface of torch 2.14 (`dist._reconfigure`): the members are given by their handles, and meet
                   through the store with which the group was created

torch's C++ code keeps the backend that was registered first for as long as the group lives. So the backends in use are
kept here, and `_get_backend` returns them.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from ddp.groups.core_arguments import Reductions
from ddp.groups.shared_work import Core, FinishedWork, InFlight
from ddp.telemetry import guard
from ddp.telemetry.coded import WrongUse

if TYPE_CHECKING:
    from ddp.groups.rank_info import HostLayout


# Waiting on a store of torch, so that a wait ends when its reason has gone.
#
# `Store.wait` cannot be interrupted, and torch prints warnings each time that such a wait times out. So a wait that
# may be interrupted asks the store again and again.

_ASK_AFTER_S = 0.001
_ASK_EVERY_S = 0.05
_SELDOM_S = 0.5


def never() -> str:
    return ""


def await_keys(store: Any, keys: list[str], timeout_s: float, interrupted: Callable[[], str] = never) -> None:
    """Wait until the store has all keys. TimeoutError: it does not have them in time.

    `interrupted` is asked at intervals. It returns why the wait must end, or "".
    """
    if interrupted is never:
        _wait(store, keys, timeout_s)
        return
    began = time.monotonic()
    while not _has(store, keys, interrupted):
        passed = time.monotonic() - began
        if passed >= timeout_s:
            raise TimeoutError(f"the store does not have {keys} after {timeout_s:g} s")
        time.sleep(pause_after(passed))


def pause_after(passed: float) -> float:
    """How long to wait before the store is asked again.

    A member that is a little late is noticed after a tenth more of that time at most. The pauses grow with the wait, so
    that many ranks that wait for long do not keep the store busy.
    """
    return max(_ASK_AFTER_S, min(passed / 10, _ASK_EVERY_S), min(passed / 100, _SELDOM_S))


def _has(store: Any, keys: list[str], interrupted: Callable[[], str]) -> bool:
    error = None
    try:
        found = bool(store.check(keys))
    except RuntimeError as lost:  # the store is gone, or the guard has cut the connection because of a pause
        found, error = False, lost
    if reason := interrupted():
        raise dist.DistBackendError(reason) from error
    if error is not None:
        raise error
    return found


def _wait(store: Any, keys: list[str], timeout_s: float) -> None:
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        if not store.check(keys):  # raises if the store is gone
            raise TimeoutError(f"the store does not have {keys} after {timeout_s:g} s") from error


def own_store(store: Any) -> Any:
    """The store below all prefixes."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


# torch annotates its methods more narrowly than it calls them.
_ProcessGroup: Any = dist.ProcessGroup


LET_GO_AFTER_S = 0.5


class FormsCore(Protocol):
    """Connects the members. Returns the core and the hosts of the members; both are None if all must use Gloo.

    `interrupted` is asked while the caller waits for other members. It returns why the wait must end, or "".
    """

    def __call__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        ranks: list[int],
        interrupted: Callable[[], str],
    ) -> tuple[Core | None, HostLayout | None]: ...


class Membership(_ProcessGroup):  # type: ignore[misc]
    """The part of a process group of `shm` and `hier` that says who its members are."""

    _core: Core | None
    _flight: InFlight | None
    _near: InFlight | None  # only if all members are on one host

    def __init__(
        self,
        name: str,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        forming: Callable[[str], FormsCore],
        ranks: list[int],
    ) -> None:
        """`forming`: what connects the members of a group of the backend with this name."""
        super().__init__(rank, size)
        self._timeout = timeout
        self._timeout_s = timeout.total_seconds()
        self._forming = forming
        self.use(name)
        self._identity = secrets.token_hex(8)
        self._numbers_used: set[int] = set()
        self._fallbacks: dict[str, Any] = {}
        self._leave()
        self._join(store, rank, size, ranks, never)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        kinds = {"cpu": dist.ProcessGroup.BackendType.GLOO, "cuda": dist.ProcessGroup.BackendType.NCCL}
        for device, backend in self._fallbacks.items():
            self._register_backend(torch.device(device), kinds[device], backend)

    # --- the place of this process -------------------------------------------------------------------

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._world

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    getRank, getSize = rank, size  # the names under which torch's C++ code asks

    def use(self, backend: str) -> None:
        """Connect the next members as a group of this backend (`shm`, `hier`)."""
        self._name, self._form = backend, self._forming(backend)

    def form_again(
        self, store: Any, rank: int, size: int, ranks: list[int], interrupted: Callable[[], str] = never
    ) -> None:
        """Replace the members. `ranks`: the ranks of the members in the job, for messages.

        If this raises, the group has no members, and every operation raises.
        """
        self.leave()
        self._join(store, rank, size, ranks, interrupted)

    def _join(
        self, store: Any, rank: int, size: int, ranks: list[int], interrupted: Callable[[], str]
    ) -> None:
        core, placed = self._form(store, rank, size, self._timeout, ranks, interrupted)
        self._fallbacks = _fallbacks(store, rank, size, self._timeout)
        self._store, self._rank, self._world = store, rank, size
        self._global_rank = ranks[rank] if ranks else rank
        self._reductions = Reductions(size)
        self._core = core
        self._flight = InFlight(core) if core is not None else None
        # Across hosts the core supports only all-reduce and barrier.
        self._near = self._flight if placed and len(placed.hosts) == 1 else None

    def leave(self) -> None:
        """Leave the other members. Their operations with this process fail, and so do all of this group."""
        core, flight = self._core, self._flight
        backends = list(self._fallbacks.values())
        self._leave()
        if core is not None and flight is not None:
            core.close()
            flight.close()
        abort_all(backends)
        let_go(backends)

    def _leave(self) -> None:
        self._core = self._flight = self._near = None
        self._fallbacks = {}

    # --- the interface of torch 2.14 -----------------------------------------------------------------

    @property
    def supports_reconfigure(self) -> bool:
        return True

    def get_reconfigure_handle(self) -> str:
        return f"{self._name}:{self._global_rank}:{self._identity}"

    def reconfigure(self, opts: Any) -> Any:
        """Replace the members by those with these handles. In a list, the position of a handle is its rank."""
        ordered = isinstance(opts.handles, list | tuple)
        handles = list(opts.handles) if ordered else sorted(opts.handles)
        self._check_reconfiguration(int(opts.uuid), handles)
        self._numbers_used.add(int(opts.uuid))
        told = hashlib.sha256("\n".join(handles).encode()).hexdigest()[:16]
        store = PrefixStore(f"reconfigure/{opts.uuid}/{told}", self._store)
        rank, former = handles.index(self.get_reconfigure_handle()), self._timeout
        base, self._timeout = self._store, opts.timeout or former
        try:
            self.form_again(store, rank, len(handles), [int(each.split(":")[1]) for each in handles])
        finally:
            self._store, self._timeout = base, former
        work = FinishedWork()
        work._tensors = []
        return work

    def _check_reconfiguration(self, number: int, handles: Sequence[str]) -> None:
        own = self.get_reconfigure_handle()
        if number in self._numbers_used:
            raise WrongUse(f"invalid uuid={number}: already used by this group. Use a new number each time")
        if len(set(handles)) != len(handles):
            raise WrongUse(f"invalid handles {list(handles)}: one is there twice. Use one handle per member")
        if own not in handles:
            raise WrongUse(
                f"invalid handles {list(handles)}: the handle {own} of this process is not among them. Call "
                "reconfigure() only in the processes that are to be members"
            )
        if unknown := [each for each in handles if not _is_handle(each, self._name)]:
            raise WrongUse(
                f"invalid handle {unknown[0]!r}: not of a group with the backend {self._name}. Use what "
                "get_reconfigure_handle() returns"
            )

    # --- the backends beside the core ------------------------------------------------------------------

    def _get_backend(self, device: torch.device) -> Any:
        kind = torch.device(device).type
        if kind not in self._fallbacks:
            raise WrongUse(f"the process group {self._name} has no backend for {kind} tensors")
        return self._fallbacks[kind]

    def _fallback(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the backend for operations outside the core. Raise if the group has failed."""
        if self._core is not None and (failure := self._core.failure()):
            raise dist.DistBackendError(failure)
        if not self._fallbacks:
            raise dist.DistBackendError(
                f"this process has left its group ({self._name}). Create a new group, or call its reconfigure()"
            )
        return self._get_backend(tensors[0].device if tensors else torch.device("cpu"))

    def abort(self) -> None:
        """Abort the group for all its members, and release all waiting threads."""
        if self._core is not None:
            self._core.abort()
        abort_all(self._fallbacks.values())

    def shutdown(self) -> None:
        core, flight = self._core, self._flight
        self._core = self._flight = self._near = None
        if core is not None and flight is not None:
            core.close()
            flight.close()
        for backend in self._fallbacks.values():
            backend.shutdown()


def abort_all(backends: Iterable[Any]) -> None:
    for backend in list(backends):
        with suppress(RuntimeError):  # of a backend that cannot be aborted
            backend.abort()


def let_go(things: list[Any]) -> None:
    """Drop references a little later: the destructor of a group of Gloo takes 15 ms, and may hold the GIL meanwhile.

    The list must have the last references.
    """
    timer = threading.Timer(LET_GO_AFTER_S, things.clear)
    timer.name, timer.daemon = "ddp-let-go", True
    timer.start()


def _is_handle(text: str, name: str) -> bool:
    parts = text.split(":")
    return len(parts) == 3 and parts[0] == name and parts[1].isdigit()


def _fallbacks(store: Any, rank: int, size: int, timeout: timedelta) -> dict[str, Any]:
    with guard.creating_group():
        gloo: Any = dist.ProcessGroupGloo(PrefixStore("gloo/", store), rank, size, timeout=timeout)
    if size > 1:
        # A member that ended now would break the connections that a slower one is still making, as in torch's groups.
        gloo.barrier().wait()
    found: dict[str, Any] = {"cpu": gloo}
    if torch.cuda.is_available() and dist.is_nccl_available():
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        found["cuda"] = ProcessGroupNCCL(PrefixStore("nccl/", store), rank, size, options)
    return found
