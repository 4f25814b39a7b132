"""The process group: collectives on CPU tensors, `get_error()`, abort, and a backend object as C++ groups have."""

from __future__ import annotations

import os
import sys
import zlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .flight import RECORDER
from .stream import Communicator, NcclLikeWork, Operation
from .watchdog import Watchdog

if TYPE_CHECKING:
    from datetime import timedelta

NAME = "nccl_like"
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
_ProcessGroup: Any = dist.ProcessGroup


def register() -> None:
    """Make the backend known to torch, and its recorder too: a build without NCCL has no `_dump_nccl_trace_json`."""
    dist.Backend.register_backend(NAME, _make, devices=["cpu"])
    RECORDER.install()
    _trace()


def _trace() -> None:
    """The launcher traces the methods of torch's class, through which calls reach NCCL. This class has its own."""
    page: Any = sys.modules.get("_ddp_status_page")
    marks = page.kept("collectives") if page is not None else None
    if marks is not None:
        marks.watch_group_class(NcclLikeGroup)
        marks.watch_work_class(NcclLikeWork)


def _make(store: Any, rank: int, size: int, timeout: timedelta) -> NcclLikeGroup:
    return NcclLikeGroup(store, rank, size, timeout)


class NcclLikeBackend:
    """What `_get_backend()` returns: the part of ProcessGroupNCCL that torch shows to Python."""

    def __init__(self, communicator: Communicator, watchdog: Watchdog, timeout: timedelta) -> None:
        self._communicator, self._watchdog, self._timeout = communicator, watchdog, timeout

    def name(self) -> str:
        return "nccl2" if os.environ.get("NCCL_LIKE_2") == "1" else "nccl"

    def get_error(self) -> Any:
        return self._watchdog.error

    def abort(self) -> None:
        self._watchdog.terminate()
        self._communicator.abort()

    def shutdown(self) -> None:
        self._watchdog.terminate()


class NcclLikeGroup(_ProcessGroup):  # type: ignore[misc]
    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._name, self._desc = "", "undefined"
        self._timeout_s = timeout.total_seconds()
        blocking = os.environ.get(_BLOCKING_WAIT) == "1"
        self._communicator = Communicator(store, rank, size, blocking)
        self._watchdog = Watchdog(self._communicator, store, self._place)
        self._backend = NcclLikeBackend(self._communicator, self._watchdog, timeout)
        self._sequence = 0
        RECORDER.add_group(self)
        self._watchdog.start()

    def _place(self) -> tuple[str, str]:
        """The names of the group: "0" and "default_pg"."""
        return self._name, self._desc

    # torch keeps both in the C++ backends of a group, of which there are none here.

    def _set_group_name(self, name: str) -> None:
        self._name = name
        super()._set_group_name(name)

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc
        super()._set_group_desc(desc)

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    def getBackendName(self) -> str:
        return NAME

    def _get_backend(self, _device: torch.device) -> NcclLikeBackend:
        return self._backend

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def abort(self) -> None:
        self._backend.abort()

    def shutdown(self) -> None:
        self._backend.shutdown()

    # --- operations ----------------------------------------------------------------------------------

    def _run(
        self, op: str, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], run: Any, opts: Any
    ) -> NcclLikeWork:
        self._sequence += 1
        sequence, asked = self._sequence, getattr(opts, "timeout", None)
        timeout_s = (
            asked.total_seconds() if asked is not None and asked.total_seconds() > 0 else self._timeout_s
        )
        operation = Operation(sequence, op, f"nccl:{name}", inputs, outputs, timeout_s)
        RECORDER.record(self, operation)
        shape = ",".join(f"{tensor.numel()}:{tensor.dtype}" for tensor in inputs if op in _ALIKE)
        work = self._communicator.enqueue(operation, zlib.crc32(f"{sequence} {op} {shape}".encode()), run)
        if opts is not None and not getattr(opts, "asyncOp", True):
            work.wait()
        return work

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        opts = dist.AllreduceOptions() if opts is None else opts

        def run(mesh: Any, tag: int) -> None:
            for tensor in tensors:
                parts = [
                    _tensor(block, tensor) for block in mesh.exchange(tag, [_bytes(tensor)] * self.size())
                ]
                tensor.copy_(_reduced(parts, opts.reduceOp))

        return self._run("ALLREDUCE", "all_reduce", tensors, tensors, run, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        opts = dist.BroadcastOptions() if opts is None else opts
        root = opts.rootRank

        def run(mesh: Any, tag: int) -> None:
            for tensor in tensors:
                mine = _bytes(tensor) if self.rank() == root else b""
                tensor.copy_(_tensor(mesh.exchange(tag, [mine] * self.size())[root], tensor))

        return self._run("BROADCAST", "broadcast", tensors, tensors, run, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        (parts,), (given,) = outputs, inputs

        def run(mesh: Any, tag: int) -> None:
            for part, block in zip(parts, mesh.exchange(tag, [_bytes(given)] * self.size()), strict=True):
                part.copy_(_tensor(block, part))

        return self._run("ALLGATHER", "all_gather", [given], list(parts), run, opts)

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        def run(mesh: Any, tag: int) -> None:
            output.view(-1).copy_(
                _tensor(b"".join(mesh.exchange(tag, [_bytes(given)] * self.size())), output).view(-1)
            )

        return self._run("_ALLGATHER_BASE", "_all_gather_base", [given], [output], run, opts)

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        opts = dist.ReduceScatterOptions() if opts is None else opts

        def run(mesh: Any, tag: int) -> None:
            blocks = [_bytes(part) for part in given.reshape(self.size(), -1)]
            parts = [_tensor(block, output) for block in mesh.exchange(tag, blocks)]
            output.copy_(_reduced(parts, opts.reduceOp))

        return self._run("_REDUCE_SCATTER_BASE", "_reduce_scatter_base", [given], [output], run, opts)

    _reduce_scatter_base = reduce_scatter_single

    def barrier(self, opts: Any = None) -> Any:
        def run(mesh: Any, tag: int) -> None:
            mesh.exchange(tag, [b""] * self.size())

        return self._run("BARRIER", "all_reduce_barrier", [], [], run, opts)


_ALIKE = ("ALLREDUCE", "BROADCAST", "_ALLGATHER_BASE", "_REDUCE_SCATTER_BASE")


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _tensor(block: bytes, like: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(block), dtype=like.dtype).view(like.shape) if block else like


def _reduced(parts: list[torch.Tensor], op: Any) -> torch.Tensor:
    stacked = torch.stack(parts)
    if op == dist.ReduceOp.MAX:
        return stacked.amax(0)
    if op == dist.ReduceOp.MIN:
        return stacked.amin(0)
    if op == dist.ReduceOp.PRODUCT:
        return stacked.prod(0)
    total = stacked.sum(0, dtype=stacked.dtype)
    return total / len(parts) if op == dist.ReduceOp.AVG else total
