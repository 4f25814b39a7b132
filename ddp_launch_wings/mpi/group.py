"""The backend `mpi4py`: torch.distributed's collectives through mpi4py, for a torch that was built without MPI.

Theory of operation
-------------------
Each group has a communicator and one thread. The thread makes blocking MPI calls in the order in which the program
starts the collectives. The order is therefore the same on all ranks if all programs use the same order. MPI receives
addresses, not Python objects. It does not support half precision: such numbers are summed in float32 and rounded once.
An MPI call cannot be cancelled: on a timeout `wait` raises, and the call continues to block its thread. Other
operations raise an error that names a backend which supports them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotInTime
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from ddp.groups.core_arguments import (
    BIT_AND,
    BIT_OR,
    BIT_XOR,
    KIND,
    MAXIMUM,
    MINIMUM,
    PRODUCT,
    REDUCTIONS,
    SUM,
)
from ddp.groups.process_group import mpi_library
from ddp.groups.shared_work import CollectiveWork
from ddp.telemetry.coded import WrongUse, WrongValue

if TYPE_CHECKING:
    from mpi4py import MPI

NAME = "mpi4py"

_TYPES = {
    torch.float64: "DOUBLE",
    torch.float32: "FLOAT",
    torch.int64: "INT64_T",
    torch.int32: "INT32_T",
    torch.int16: "INT16_T",
    torch.int8: "INT8_T",
    torch.uint8: "UINT8_T",
    torch.bool: "UINT8_T",
}
_HALVES = (torch.float16, torch.bfloat16)
_NAMES = {
    SUM: "SUM",
    PRODUCT: "PROD",
    MINIMUM: "MIN",
    MAXIMUM: "MAX",
    BIT_AND: "BAND",
    BIT_OR: "BOR",
    BIT_XOR: "BXOR",
}
_OF_BOOLS = {SUM: MAXIMUM, PRODUCT: MINIMUM}  # for booleans, so that a true byte stays 1
_NO_TIMEOUT = timedelta(0)

# torch's type stubs are narrower than its calls.
_ProcessGroup: Any = dist.ProcessGroup


# --- tensors as MPI arguments -------------------------------------------------------------------------


def _unsupported(what: str, backend: str = "gloo", *, only: str = "") -> NotImplementedError:
    limit = f" It supports only {only}." if only else ""
    return NotImplementedError(
        f"the mpi4py backend does not support {what}.{limit} Use the backend {backend}"
    )


def _check_supported(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise _unsupported("sparse tensors", "gloo")
        if not tensor.is_cpu:
            raise _unsupported(f"tensors on {tensor.device}", "nccl or gloo", only="CPU tensors")


def _real(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one new array with the data of all tensors, of a type that MPI can sum."""
    flat = torch.cat([_real(tensor).reshape(-1) for tensor in tensors])
    return flat.float() if flat.dtype in _HALVES else flat


def _unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy the data of such an array back into the tensors."""
    at = 0
    for tensor in tensors:
        n = tensor.numel() * (2 if tensor.is_complex() else 1)
        part = flat[at : at + n]
        whole = torch.view_as_complex(part.view(-1, 2)) if tensor.is_complex() else part
        tensor.detach().copy_(whole.view(tensor.shape))
        at += n


def _bytes_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1).resolve_conj().resolve_neg() for tensor in tensors]).view(
        -1
    )


def _buffer(mpi: Any, flat: torch.Tensor, as_bytes: bool = False) -> list[Any]:
    """Return a buffer without a count. mpi4py derives the count, which for some arrays is the count per rank."""
    memory = mpi.memory.fromaddress(flat.data_ptr(), flat.nbytes)
    return [memory, mpi.BYTE if as_bytes else getattr(mpi, _TYPES[flat.dtype])]


def _operation(mpi: Any, opts: Any, tensor: torch.Tensor) -> tuple[Any, bool]:
    """Return MPI's operation, and whether to divide the result by the number of ranks."""
    kind = opts.reduceOp.op
    how = REDUCTIONS.get(kind)
    real = _real(tensor).dtype
    whole = not (real.is_floating_point or tensor.is_complex())
    averaged = bool(kind == KIND.AVG)
    if how is None or (averaged and whole) or (how > MAXIMUM and not whole):
        raise _unsupported(f"{kind} for {tensor.dtype}", "gloo or nccl")
    if real not in _TYPES and real not in _HALVES:
        raise _unsupported(f"reductions of {tensor.dtype}")
    if tensor.is_complex() and how != SUM:
        raise _unsupported(f"{kind} for complex tensors", only="SUM for them")
    if real is torch.bool:
        how = _OF_BOOLS.get(how, how)
    return getattr(mpi, _NAMES[how]), averaged


# --- a started operation ------------------------------------------------------------------------------


class MpiWork(CollectiveWork):
    """One MPI call on the thread of its group."""

    def __init__(self, under_way: Future[None], tensors: list[torch.Tensor], timeout_s: float) -> None:
        super().__init__()
        self._under_way = under_way
        self._tensors = tensors
        self._timeout_s = timeout_s
        self._future: Any = None

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        limit_s = timeout.total_seconds()
        limit_s = limit_s if limit_s > 0 else self._timeout_s
        try:
            self._under_way.result(limit_s)
        except NotInTime:
            raise dist.DistBackendError(
                f"the collective did not complete within {limit_s:g} s: a rank has not called it, or has exited. See "
                "the logs of all ranks, and restart the job: MPI cannot cancel the collective"
            ) from None
        return True

    def is_completed(self) -> bool:
        return self._under_way.done()

    def exception(self) -> BaseException | None:
        return self._under_way.exception() if self._under_way.done() else None

    def get_future(self) -> Any:
        """Return torch's future.

        Its callback raises errors, because torch's C++ code detects only errors of callbacks.
        """
        if self._future is None:
            done: Any = torch.futures.Future()
            self._future = done.then(lambda _none: self._outcome())
            self._under_way.add_done_callback(lambda _done: done.set_result(None))
        return self._future

    def _outcome(self) -> list[torch.Tensor]:
        self._under_way.result()
        return self._tensors


# --- the group -----------------------------------------------------------------------------------------


class MpiGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group with an MPI communicator and a thread of its own."""

    def __init__(self, mpi: Any, communicator: MPI.Intracomm, timeout: timedelta) -> None:
        super().__init__(communicator.rank, communicator.size)
        self._mpi = mpi
        self._communicator = communicator
        self._world = communicator.size
        self._timeout_s = timeout.total_seconds()
        self._thread = ThreadPoolExecutor(1, "ddp-mpi")

    def getBackendName(self) -> str:
        return NAME

    def _start(self, call: Callable[[], None], tensors: list[torch.Tensor], opts: Any) -> MpiWork:
        asked_s = opts.timeout.total_seconds() if opts is not None else 0.0
        under_way = self._thread.submit(self._with_torch_errors, call)
        return MpiWork(under_way, tensors, asked_s if asked_s > 0 else self._timeout_s)

    def _with_torch_errors(self, call: Callable[[], None]) -> None:
        try:
            call()
        except self._mpi.Exception as error:
            raise dist.DistBackendError(f"MPI: {error}") from error

    # --- collectives that reduce ---

    def allreduce(self, tensors: Any, opts: Any = None) -> MpiWork:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        opts = dist.AllreduceOptions() if opts is None else opts
        _check_supported(tensors)
        operation, averaged = _operation(self._mpi, opts, tensors[0])

        def call() -> None:
            flat = _flatten(tensors)
            self._communicator.Allreduce(self._mpi.IN_PLACE, _buffer(self._mpi, flat), operation)
            _unflatten(flat.div_(self._world) if averaged else flat, tensors)

        return self._start(call, tensors, opts)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any) -> MpiWork:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Any, opts: Any) -> MpiWork:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        _check_supported(tensors)
        operation, averaged = _operation(self._mpi, opts, tensors[0])

        def call() -> None:
            flat = _flatten(tensors)
            there = self._communicator.rank == opts.rootRank
            given = self._mpi.IN_PLACE if there else _buffer(self._mpi, flat)
            got = _buffer(self._mpi, flat) if there else None
            self._communicator.Reduce(given, got, operation, opts.rootRank)
            if there:
                _unflatten(flat.div_(self._world) if averaged else flat, tensors)

        return self._start(call, tensors, opts)

    def _reduce_scatter(self, output: torch.Tensor, parts: Sequence[torch.Tensor], opts: Any) -> MpiWork:
        opts = dist.ReduceScatterOptions() if opts is None else opts
        _check_supported([output, *parts])
        if sum(part.numel() for part in parts) != output.numel() * self._world:
            given_for_each = sum(part.numel() for part in parts) / self._world
            raise WrongValue(
                f"invalid sizes for reduce_scatter: the input has {given_for_each:g} elements per rank, but the output "
                f"has {output.numel()}. They must be equal"
            )
        operation, averaged = _operation(self._mpi, opts, output)

        def call() -> None:
            flat = _flatten(parts)
            got = torch.empty(flat.numel() // self._world, dtype=flat.dtype)
            given = _buffer(self._mpi, flat)
            self._communicator.Reduce_scatter_block(given, _buffer(self._mpi, got), operation)
            _unflatten(got.div_(self._world) if averaged else got, [output])

        return self._start(call, [output], opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> MpiWork:
        if len(outputs) != 1:
            raise _unsupported(
                f"reduce_scatter of {len(outputs)} tensors in one call", only="one tensor per call"
            )
        return self._reduce_scatter(outputs[0], inputs[0], opts)

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> MpiWork:
        return self._reduce_scatter(output, [given], opts)

    _reduce_scatter_base = reduce_scatter_single

    # --- collectives that move bytes ---

    def broadcast(self, tensors: Any, opts: Any = None) -> MpiWork:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        opts = dist.BroadcastOptions() if opts is None else opts
        _check_supported(tensors)

        def call() -> None:
            for tensor in tensors:
                flat = _bytes_of([tensor])
                self._communicator.Bcast(_buffer(self._mpi, flat, as_bytes=True), opts.rootRank)
                if self._communicator.rank != opts.rootRank:
                    tensor.detach().copy_(flat.view(tensor.shape))

        return self._start(call, tensors, opts)

    def _all_gather(self, outputs: Sequence[torch.Tensor], given: torch.Tensor, opts: Any) -> MpiWork:
        _check_supported([given, *outputs])
        if sum(output.numel() for output in outputs) != given.numel() * self._world:
            got_from_each = sum(output.numel() for output in outputs) / self._world
            raise WrongValue(
                f"invalid sizes for all_gather: the input has {given.numel()} elements, but the output has "
                f"{got_from_each:g} per rank. They must be equal"
            )

        def call() -> None:
            mine = _bytes_of([given])
            all_of_them = torch.empty(mine.numel() * self._world, dtype=mine.dtype)
            sent = _buffer(self._mpi, mine, as_bytes=True)
            self._communicator.Allgather(sent, _buffer(self._mpi, all_of_them, as_bytes=True))
            at = 0
            for output in outputs:
                output.detach().copy_(all_of_them[at : at + output.numel()].view(output.shape))
                at += output.numel()

        return self._start(call, list(outputs), opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> MpiWork:
        if len(inputs) != 1:
            raise _unsupported(f"all_gather of {len(inputs)} tensors in one call", only="one tensor per call")
        return self._all_gather(outputs[0], inputs[0], opts)

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> MpiWork:
        return self._all_gather([output], given, opts)

    _allgather_base = all_gather_single

    def barrier(self, opts: Any = None) -> MpiWork:
        return self._start(self._communicator.Barrier, [], opts)

    # --- unsupported operations ---

    def _refuse(self, what: str) -> NoReturn:
        raise _unsupported(what)

    def send(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse("send and recv")

    recv = recv_anysource = send

    def gather(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse("gather")

    def scatter(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse("scatter")

    def alltoall(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse("all-to-all")

    alltoall_base = all_to_all_single = alltoall

    # --- the end ---

    def shutdown(self) -> None:
        self._thread.shutdown(wait=True)
        if self._communicator is not None and self._communicator != self._mpi.COMM_NULL:
            self._communicator.Free()


def create(asked: Any, _options: Any = None) -> MpiGroup:
    from mpi4py import MPI

    ranks = list(asked.global_ranks_in_group) or list(range(asked.group_size))
    world = MPI.COMM_WORLD
    if ranks[asked.group_rank] != world.rank or ranks[-1] >= world.size:
        raise WrongUse(
            f"this process is rank {ranks[asked.group_rank]} in torch.distributed, but rank {world.rank} of "
            f"{world.size} in MPI. Start the script with mpirun, or use another backend"
        )
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise WrongUse(
            "this MPI does not support MPI_THREAD_MULTIPLE, which the mpi4py backend needs. Use the backend gloo"
        )
    tag = zlib.crc32(str(asked.group_id).encode()) % 32768
    return MpiGroup(MPI, world.Create_group(world.group.Incl(ranks), tag), asked.timeout)


def register() -> None:
    mpi_library()
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
