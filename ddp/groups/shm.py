"""Create the backends `shm` (one host) and `hier` (shared memory on each host, a TCP ring between hosts).

The ranks publish in the store which host they are on. Either all ranks use the compiled core, or all use Gloo.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import (
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    GatherOptions,
    ReduceOp,
    ScatterOptions,
)
from torch.distributed.distributed_c10d import AllgatherOptions

from ddp.groups import core_loading, joining, membership, ring, segment
from ddp.groups.core_arguments import (
    ALL_GATHER,
    ALL_REDUCE,
    BARRIER,
    BROADCAST,
    BYTES,
    REDUCE,
    REDUCE_SCATTER,
    Operands,
    Reduction,
    averaging,
    in_order,
    operands,
    reduce_options,
    suits,
)
from ddp.groups.membership import FormsCore, Membership
from ddp.groups.rank_info import HostLayout, layout
from ddp.groups.shared_work import (
    FAILED,
    NOT_YET,
    CombinedWork,
    FinishedWork,
    InFlight,
    SharedWork,
    call_for_each,
)
from ddp.telemetry import collective_marks, torch_api, torch_names
from ddp.telemetry.coded import WrongValue
from ddp.telemetry.collective_marks import name_ranks

# --- the process group -----------------------------------------------------------------------------
#
# A process group whose CPU collectives run in the compiled core.
#
# Operations that the core does not support (point-to-point, all-to-all, sparse tensors, rare dtypes) use a backend
# of torch: Gloo for CPU tensors, NCCL for tensors on GPUs. Without the core, all operations use a backend of torch.
# The group calls the backends directly, not through its base class. A base method that Python can override holds
# the GIL while it runs. Gloo's threads need the GIL to release tensors, and they release them while they hold a
# lock of Gloo. So this could deadlock.

_NOTHING = Operands([], 0, [], None)
# Below this size, waking the core's thread and sharing a CPU with it costs more than an overlap can save.
_MIN_BYTES_TO_WAKE = 4 << 20
_SUM: int = int(ReduceOp.SUM)  # type: ignore[call-overload]


class SharedGroup(Membership):
    """A process group of the backends `shm` and `hier`."""

    def getBackendName(self) -> str:
        return self._name

    # --- operations of the core ----------------------------------------------------------------------

    def _post(
        self,
        flight: InFlight,
        kind: int,
        reduction: Reduction,
        count: int,
        given: Operands,
        got: Operands,
        result: list[torch.Tensor],
        opts: Any = None,
        root: int = 0,
        wakes: bool = True,
        tag: int = 0,
    ) -> dist.Work:
        """Submit an operation to the core.

        `wakes`: start it now, on the core's thread, not on the thread that waits for it. `tag`: if the ranks use
        different ones, the operation fails on all of them.
        """
        timeout_s, waits = self._timeout_s, False
        if opts is not None:
            timeout_s, waits = self._limit_s(opts), not opts.asyncOp
        ticket = flight.core.post(
            kind,
            reduction.element,
            reduction.how,
            root,
            count,
            reduction.divisor,
            timeout_s,
            wakes and not waits,
            given.numbers,
            got.numbers,
            tag,
        )
        work = SharedWork(flight, ticket, result, (given.kept, got.kept), got.after)
        if waits:
            work.wait()
        return work

    def _limit_s(self, opts: Any) -> float:
        asked = opts.timeout
        return asked.total_seconds() if asked.days >= 0 and asked else self._timeout_s

    def _reduce_at_once(self, flight: InFlight, tensors: Any, opts: Any) -> dist.Work | None:
        """The fast path of most calls: one contiguous tensor, and the caller waits for the result."""
        (tensor,) = tensors
        if not (tensor.is_cpu and tensor.layout is torch.strided and in_order(tensor)):
            return None
        reduction = self._reduction(opts, tensor.dtype)
        if reduction is None:
            return None
        state = flight.core.all_reduce(
            reduction.element,
            reduction.how,
            reduction.divisor,
            self._limit_s(opts),
            tensor.data_ptr(),
            tensor.nbytes,
        )
        if state == NOT_YET:
            return None
        if state == FAILED:
            raise dist.DistBackendError(flight.core.failure())
        work = FinishedWork()
        work._tensors = tensors
        return work

    def _reduction(self, opts: Any, dtype: torch.dtype) -> Reduction | None:
        op = opts.reduceOp
        return self._reductions[dtype][_SUM if op == ReduceOp.SUM else int(op.op)]  # the comparison is faster

    def _has_root(self, tensors: Sequence[torch.Tensor], opts: Any) -> bool:
        """Whether the root is valid; otherwise Gloo handles the call, or reports the error."""
        return len(tensors) == 1 and 0 <= opts.rootRank < self._world and opts.rootTensor == 0

    def _all_reduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> dist.Work | None:
        """Start an all-reduce in the core. None: the core does not support it."""
        flight = self._flight
        if flight is None or not suits(tensors):
            return None
        reduction = self._reduction(opts, tensors[0].dtype)
        if reduction is None:
            return None
        got = operands(tensors, written=True)
        count = got.size // reduction.element_size
        return self._post(flight, ALL_REDUCE, reduction, count, _NOTHING, got, list(tensors), opts)

    # --- collectives that reduce -----------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, **named: Any) -> Any:
        if type(tensors) is not list and isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        opts = reduce_options(AllreduceOptions, opts, named)
        if self._flight is not None and len(tensors) == 1 and not opts.asyncOp:
            work = self._reduce_at_once(self._flight, tensors, opts)
            if work is not None:
                return work
        # Several tensors would be those of one rank's devices, which are added to one sum.
        work = self._all_reduce(tensors, opts) if len(tensors) == 1 else None
        return self._fallback(tensors).allreduce(tensors, opts) if work is None else work

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        opts = AllreduceCoalescedOptions() if opts is None else opts
        return self._all_reduce(tensors, opts) or self._fallback(tensors).allreduce_coalesced(tensors, opts)

    def reduce(self, tensors: Any, opts: Any = None, **named: Any) -> Any:
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        opts = reduce_options(dist.ReduceOptions, opts, named)
        flight = self._near
        in_core = suits(tensors) and self._has_root(tensors, opts)
        reduction = self._reduction(opts, tensors[0].dtype) if in_core else None
        if flight is None or reduction is None:
            return self._fallback(tensors).reduce(tensors, opts)
        # Like Gloo, change only the root's tensor.
        got = operands(tensors, written=self.rank() == opts.rootRank)
        count = got.size // reduction.element_size
        return self._post(flight, REDUCE, reduction, count, _NOTHING, got, tensors, opts, opts.rootRank)

    def _reduce_scatter(
        self, output: torch.Tensor, given: Sequence[torch.Tensor], opts: Any
    ) -> dist.Work | None:
        flight = self._near
        if flight is None or not suits([output, *given]):
            return None
        reduction = self._reduction(opts, output.dtype)
        if reduction is None or sum(t.numel() for t in given) != output.numel() * self._world:
            return None
        got = operands([output], written=True, read=False)
        count = got.size // reduction.element_size
        parts = operands(given, written=False)
        return self._post(flight, REDUCE_SCATTER, reduction, count, parts, got, [output], opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = dist.ReduceScatterOptions() if opts is None else opts
        work = None
        if len(outputs) == len(inputs) == 1 and self._one_each(inputs[0], outputs[0]):
            work = self._reduce_scatter(outputs[0], inputs[0], opts)
        return self._fallback(outputs).reduce_scatter(outputs, inputs, opts) if work is None else work

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        opts = dist.ReduceScatterOptions() if opts is None else opts
        work = self._reduce_scatter(output, [given], opts)
        return self._fallback([output])._reduce_scatter_base(output, given, opts) if work is None else work

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return call_for_each(self.reduce_scatter_single, outputs, inputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _one_each(self, parts: Sequence[torch.Tensor], like: torch.Tensor) -> bool:
        return len(parts) == self._world and all(part.numel() == like.numel() for part in parts)

    # --- collectives that move bytes -------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, **named: Any) -> Any:
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        if isinstance(opts, int):
            named["root"] = opts
            opts = None
        if opts is None:
            opts = dist.BroadcastOptions()
            opts.rootRank = named.get("root", 0)
        flight = self._near
        if flight is None or not suits(tensors) or not self._has_root(tensors, opts):
            return self._fallback(tensors).broadcast(tensors, opts)
        at_root = self.rank() == opts.rootRank
        got = operands(tensors, written=not at_root, read=at_root)
        return self._post(
            flight, BROADCAST, BYTES, got.size, _NOTHING, got, list(tensors), opts, opts.rootRank
        )

    def _all_gather(
        self, outputs: Sequence[torch.Tensor], given: torch.Tensor, opts: Any
    ) -> dist.Work | None:
        flight = self._near
        if flight is None or not suits([given, *outputs]):
            return None
        if sum(t.numel() for t in outputs) != given.numel() * self._world:
            return None
        got = operands(outputs, written=True, read=False)
        part = operands([given], written=False)
        return self._post(flight, ALL_GATHER, BYTES, part.size, part, got, list(outputs), opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = AllgatherOptions() if opts is None else opts
        work = None
        if len(outputs) == len(inputs) == 1 and self._one_each(outputs[0], inputs[0]):
            work = self._all_gather(outputs[0], inputs[0], opts)
        return self._fallback(inputs).allgather(outputs, inputs, opts) if work is None else work

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        opts = AllgatherOptions() if opts is None else opts
        work = self._all_gather([output], given, opts)
        return self._fallback([given])._allgather_base(output, given, opts) if work is None else work

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return call_for_each(self.all_gather_single, outputs, inputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def barrier(self, opts: Any = None) -> Any:
        opts = BarrierOptions() if opts is None else opts
        if self._flight is None:
            return self._fallback(()).barrier(opts)
        return self._post(self._flight, BARRIER, BYTES, 0, _NOTHING, _NOTHING, [], opts)

    # --- operations outside the core --------------------------------------------------------------------

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Any:
        return self._fallback(tensors).send(tensors, to, tag)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Any:
        return self._fallback(tensors).recv(tensors, source, tag)

    def all_to_all_single(
        self, output: torch.Tensor, given: torch.Tensor, got_splits: Any, given_splits: Any, opts: Any = None
    ) -> Any:
        opts = AllToAllOptions() if opts is None else opts
        return self._fallback([given]).alltoall_base(output, given, got_splits, given_splits, opts)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._fallback(inputs).alltoall(outputs, inputs, AllToAllOptions() if opts is None else opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = AllgatherOptions() if opts is None else opts
        return self._fallback(inputs).allgather_coalesced(outputs, inputs, opts)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Any:
        return self._fallback(tensors).recv_anysource(tensors, tag)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        self._fallback(()).monitored_barrier(timeout or self._timeout, wait_all_ranks)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._fallback(inputs).gather(outputs, inputs, GatherOptions() if opts is None else opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._fallback(outputs).scatter(outputs, inputs, ScatterOptions() if opts is None else opts)

    # --- the interface to the reducer ------------------------------------------------------------------

    @property
    def ddp_device_types(self) -> tuple[str, ...]:
        """Device types for which a list of tensors is averaged in place.

        Gloo and NCCL are faster with one flat bucket.
        """
        return ("cpu",) if self._core is not None else ()

    def ddp_allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate memory that peers can reduce in place; fall back to ordinary memory."""
        if self._core is not None and numel:
            with suppress(MemoryError):
                block = self._core.allocate(numel * dtype.itemsize)
                return torch.frombuffer(block, dtype=dtype, count=numel)
        return torch.empty(numel, dtype=dtype)

    def ddp_average(self, tensors: list[torch.Tensor], divisor: float, tag: int = 0) -> Any:
        """Average the tensors in place. The list is treated as one flat array. Ranks must use the same tag."""
        flight = self._flight
        if flight is not None and suits(tensors):
            reduction = averaging(tensors[0].dtype, divisor)
            if reduction is not None:
                got = operands(tensors, written=True)
                count = got.size // reduction.element_size
                wakes = self._near is None or got.size > _MIN_BYTES_TO_WAKE
                return self._post(
                    flight, ALL_REDUCE, reduction, count, _NOTHING, got, tensors, wakes=wakes, tag=tag
                )
        torch_api.get(torch_names.FOREACH_DIVIDE)(tensors, divisor)
        real = [torch.view_as_real(each) if each.is_complex() else each for each in tensors]
        return self._fallback(tensors).allreduce_coalesced(real)


# --- the backends ----------------------------------------------------------------------------------

# Bytes per turn; each member has two buffers. On one host the buffers fit a core's cache. Across hosts they are large
# enough for the link. With one rank per host, ranks do not use buffers: it is only the portion sent around the ring.
STAGING_NEAR = 1 << 19
STAGING_FAR = 1 << 22
STAGING_ALONE = 1 << 26
# The minimum timeout for creating a group. The group's own timeout may be shorter.
MIN_CREATION_S = 30.0


@dataclass(frozen=True, slots=True)
class _Entry:
    """The data that a rank publishes.

    If `reason` is set, the rank cannot use the core, and the other fields are empty.
    """

    host: str = ""
    host_name: str = ""
    reason: str = ""
    listener: str = ""
    listener_secret: str = ""
    address: str = ""
    port: int = 0
    port_secret: str = ""


class _Unable(Exception):
    """A rank cannot use the core, so no rank uses it."""


class _Setup:
    """Creates the group. Each rank has its own instance."""

    def __init__(
        self,
        name: str,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        ranks: list[int],
        interrupted: Callable[[], str] = membership.never,
    ) -> None:
        self.name = name
        self.store = store
        self.rank = rank
        self.size = size
        self.timeout_s = max(timeout.total_seconds(), MIN_CREATION_S)
        self.ranks = ranks or list(range(size))
        self.interrupted = interrupted
        self.listener: segment.SegmentListener | None = None
        self.port: ring.Port | None = None

    def core(self) -> tuple[Any, HostLayout | None]:
        """Return the core's group and the hosts of its ranks. Both are None if all ranks must use Gloo."""
        entries = [
            _Entry(**json.loads(each))
            for each in self._exchange("entry", json.dumps(asdict(self._own_entry())))
        ]
        try:
            return self._form(entries)
        except _Unable as reason:
            core_loading.warn_once(str(reason))
            return None, None
        finally:
            for each in (self.listener, self.port):
                if each is not None:
                    each.socket.close()

    def _exchange(self, what: str, mine: str) -> list[str]:
        self.store.set(f"{what}/{self.rank}", mine)
        self._await([f"{what}/{other}" for other in range(self.size)])
        return [self.store.get(f"{what}/{other}").decode() for other in range(self.size)]

    def _await(self, keys: list[str]) -> None:
        """Wait for keys with the group's timeout. The store's own timeout can be 30 minutes (the default group's)."""
        try:
            membership.await_keys(self.store, keys, self.timeout_s, self.interrupted)
        except TimeoutError as error:
            late = [rank for rank, key in zip(self.ranks, keys, strict=True) if not self.store.check([key])]
            who = f"{name_ranks(late)} {'has' if len(late) == 1 else 'have'}"
            raise dist.DistBackendError(
                f"{who} not joined the new group {self.name} within {self.timeout_s:g} s. All ranks must create their "
                "groups in the same order. See the log of that rank"
            ) from error

    def _own_entry(self) -> _Entry:
        if core_loading.native() is None:
            return _Entry(reason="has no compiled core: install the same package on all ranks")
        try:
            self.listener = segment.open_listener()
            if self.name == "hier":
                self.port = ring.open_port()
            host = os.environ.get("DDP_HOST_KEY", "") + segment.host_key()
        except OSError as error:
            return _Entry(reason=f"cannot set up its sockets: {error}")
        entry = _Entry(
            host, socket.gethostname(), listener=self.listener.name, listener_secret=self.listener.secret
        )
        if self.port is None:
            return entry
        address, number, secret = self.port.address, self.port.number, self.port.secret
        return replace(entry, address=address, port=number, port_secret=secret)

    def _form(self, entries: list[_Entry]) -> tuple[Any, HostLayout]:
        for rank, entry in zip(self.ranks, entries, strict=True):
            if entry.reason:
                raise _Unable(f"rank {rank} {entry.reason}")
        placed = layout([entry.host for entry in entries], self.rank)
        if self.name == "shm" and len(placed.hosts) > 1:
            raise WrongValue(
                f"the backend shm supports ranks on one host only, but this group has ranks on {len(placed.hosts)} "
                "hosts. Use hier, which is shm on each host and a ring between hosts"
            )
        made: Any = None
        try:
            made, reason = self._connect(entries, placed), ""
        except OSError as error:
            reason = f"cannot share memory or connect: {error}"
        for rank, problem in zip(self.ranks, self._exchange("ready", reason), strict=True):
            if problem:
                raise _Unable(f"rank {rank} {problem}")
        return made, placed

    def _connect(self, entries: list[_Entry], placed: HostLayout) -> Any:
        native = core_loading.native()
        assert native is not None
        assert self.listener is not None
        staging = _staging(placed)
        region = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        listeners = [(entries[rank].listener, entries[rank].listener_secret) for rank in placed.here]
        length = native.length(len(placed.here), staging, region)
        near = segment.connect_members(
            self.listener, listeners, placed.member, length, self.timeout_s, self.interrupted
        )
        far, links = None, (0, 0, -1, -1, 0, 0)
        try:
            if placed.is_leader:
                far = self._link(entries, placed)
                previous = self.ranks[placed.leader_at(placed.host - 1)]
                links = (0, 0, *far.sockets(), self.ranks[placed.leader_at(placed.host + 1)], previous)
            if len(placed.hosts) > 1:
                links = (len(placed.hosts), placed.host, *links[2:])
            members = [self.ranks[rank] for rank in placed.here]
            leaders = placed.leaders
            hosts = self._labels(entries, placed)
            made = native.Group(
                near.file, placed.member, near.sockets(), members, staging, region, leaders, links, hosts
            )
        except OSError:
            near.close()
            if far is not None:
                far.close()
            raise
        near.hand_over()
        if far is not None:
            far.hand_over()
        return made

    def _labels(self, entries: list[_Entry], placed: HostLayout) -> list[str]:
        """The ranks and the name of each host, for error messages."""
        return [
            f"{name_ranks([self.ranks[rank] for rank in ranks])} on {entries[ranks[0]].host_name}"
            for ranks in placed.hosts
        ]

    def _link(self, entries: list[_Entry], placed: HostLayout) -> ring.RingLinks:
        assert self.port is not None
        following = entries[placed.leader_at(placed.host + 1)]
        previous = placed.leader_at(placed.host - 1)
        where = (following.address, following.port, following.port_secret)
        return ring.join(self.port, self.rank, where, previous, self.timeout_s, self.interrupted)


def _staging(placed: HostLayout) -> int:
    if len(placed.hosts) == 1:
        return STAGING_NEAR
    return STAGING_FAR if max(len(ranks) for ranks in placed.hosts) > 1 else STAGING_ALONE


def _forming(name: str) -> FormsCore:
    def form(
        store: Any, rank: int, size: int, timeout: timedelta, ranks: list[int], interrupted: Callable[[], str]
    ) -> tuple[Any, HostLayout | None]:
        return _Setup(name, store, rank, size, timeout, ranks, interrupted).core()

    return form


def _create(name: str, asked: Any) -> SharedGroup:
    ranks = list(asked.global_ranks_in_group)
    size, timeout = asked.group_size, asked.timeout
    return SharedGroup(name, asked.store, asked.group_rank, size, timeout, _forming, ranks)


def create_shm(asked: Any, _options: Any = None) -> SharedGroup:
    return _create("shm", asked)


def create_hier(asked: Any, _options: Any = None) -> SharedGroup:
    return _create("hier", asked)


def register() -> bool:
    """Register `shm` and `hier` with torch.distributed; return whether the compiled core is available."""
    for name, create in (("shm", create_shm), ("hier", create_hier)):
        if name not in dist.Backend.backend_list:
            dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu"])
    joining.watch(SharedGroup)
    collective_marks.watch(SharedGroup, (SharedWork, FinishedWork, CombinedWork))
    return core_loading.native() is not None


register()
