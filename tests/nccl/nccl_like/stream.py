"""The thread that executes the operations of a communicator in order, and what a rank waits on meanwhile."""

from __future__ import annotations

import ctypes
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from . import faults, nccl_text
from .mesh import Gone, Mesh, Mismatch, Released

if TYPE_CHECKING:
    from collections.abc import Callable

    from .faults import Fault

_LIBC = ctypes.CDLL(None)  # its calls release the GIL
_MUTEX_BYTES = 64
_LOOK_EVERY_S = 0.001
_NO_TIMEOUT = timedelta(0)


class Gate:
    """Blocks in native code without the GIL. Unlike Python's locks, no signal handler runs while a thread waits."""

    def __init__(self) -> None:
        self._mutex = ctypes.create_string_buffer(_MUTEX_BYTES)
        _LIBC.pthread_mutex_init(self._mutex, None)
        _LIBC.pthread_mutex_lock(self._mutex)
        self.is_open = False

    def open(self) -> None:
        if not self.is_open:
            self.is_open = True
            _LIBC.pthread_mutex_unlock(self._mutex)

    def wait(self) -> None:
        if not self.is_open:
            _LIBC.pthread_mutex_lock(self._mutex)
            _LIBC.pthread_mutex_unlock(self._mutex)


@dataclass
class Operation:
    """What the watchdog and the flight recorder know of an operation."""

    sequence: int
    op: str  # ALLREDUCE
    name: str  # nccl:all_reduce
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    timeout_s: float
    enqueued_at: float = field(default_factory=time.monotonic)
    enqueued_ns: int = field(default_factory=time.time_ns)
    completed_ns: int = 0
    started: bool = False
    done: bool = False
    exception: str = ""
    is_p2p: bool = False
    gate: Gate = field(default_factory=Gate)

    def __str__(self) -> str:
        numel = [sum(tensor.numel() for tensor in tensors) for tensors in (self.inputs, self.outputs)]
        return nccl_text.work(self.sequence, self.op, *numel, int(self.timeout_s * 1000))


class NcclLikeWork(dist.Work):
    def __init__(self, communicator: Communicator, operation: Operation) -> None:
        super().__init__()
        self._communicator, self.operation = communicator, operation
        self._future: Any = None

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        if self._communicator.blocking_wait:
            self._wait_and_look()
        else:
            self.operation.gate.wait()
        return True

    def _wait_and_look(self) -> None:
        """With TORCH_NCCL_BLOCKING_WAIT=1 there is no watchdog: whoever waits looks for errors, and raises them."""
        operation, communicator = self.operation, self._communicator
        while not operation.gate.is_open and not operation.exception:
            time.sleep(_LOOK_EVERY_S)
            if communicator.async_error:
                operation.exception = communicator.async_error
            elif (ran_s := time.monotonic() - operation.enqueued_at) > operation.timeout_s:
                operation.exception = nccl_text.timed_out(
                    communicator.rank, str(operation), int(ran_s * 1000)
                )
                nccl_text.log("E", 685, operation.exception)
        if operation.exception:
            communicator.abort()
            raise dist.DistBackendError(operation.exception)

    def is_completed(self) -> bool:
        return self.operation.done or bool(self.operation.exception)

    def is_success(self) -> bool:
        return self.operation.done

    def exception(self) -> BaseException | None:
        return dist.DistBackendError(self.operation.exception) if self.operation.exception else None

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return self.operation.outputs

    def get_future(self) -> Any:
        if self._future is None:
            self._future = torch.futures.Future()
            self._communicator.promise(self.operation, self._future)
        return self._future


class Communicator:
    """Operations of one group between its ranks, the asynchronous error, and abort."""

    def __init__(self, store: Any, rank: int, size: int, blocking_wait: bool) -> None:
        self._store, self.rank, self.size = store, rank, size
        self.blocking_wait = blocking_wait
        self.async_error = ""
        self.cuda_error = ""
        self.aborted = False
        self._abort_hangs = False
        self._mesh: Mesh | None = None
        self._queue: SimpleQueue[tuple[Operation, int, Callable[[Mesh, int], None]] | None] = SimpleQueue()
        self._promised: list[tuple[Operation, Any]] = []
        self._lock = threading.Lock()
        self.pending: list[Operation] = []

    def _initialise(self) -> None:
        if faults.sticky.init_hangs:
            Gate().wait()
        if faults.sticky.raises:
            raise dist.DistBackendError(nccl_text.raised_in_call(faults.sticky.raises))
        self._mesh = Mesh(self._store, self.rank, self.size)
        threading.Thread(target=self._run, name="nccl-like-stream", daemon=True).start()

    def enqueue(self, operation: Operation, tag: int, run: Callable[[Mesh, int], None]) -> NcclLikeWork:
        fault = faults.taken()
        if fault is not None:
            self._break(fault)
        if self.aborted:
            raise dist.DistBackendError(nccl_text.aborted(self.rank))
        if self._mesh is None:
            self._initialise()
        with self._lock:
            self.pending.append(operation)
        self._queue.put((operation, tag, run))
        return NcclLikeWork(self, operation)

    def _break(self, fault: Fault) -> None:
        for line in fault.warnings:
            nccl_text.warn(line)
        if fault.raises:
            raise dist.DistBackendError(nccl_text.raised_in_call(fault.raises))
        self.async_error, self.cuda_error = fault.error, fault.cuda
        self._abort_hangs = fault.abort_hangs
        faults.sticky.silent |= fault.silent
        faults.sticky.watchdog_hangs |= fault.watchdog_hangs
        if self._mesh is not None and fault.leaves:
            self._mesh.close()
        if fault.error or fault.cuda or fault.hangs:
            self._queue.put(None)  # the stream does not go on

    # --- the stream ----------------------------------------------------------------------------------

    def _run(self) -> None:
        assert self._mesh is not None
        while (item := self._queue.get()) is not None:
            operation, tag, run = item
            operation.started = True
            try:
                run(self._mesh, tag)
            except Released:
                return
            except Mismatch:
                self._await_gone()
                return
            except Gone as gone:
                self._lost(gone.rank)
                return
            self._finished(operation)

    def _await_gone(self) -> None:
        assert self._mesh is not None
        try:
            self._mesh.await_gone()
        except Gone as gone:
            self._lost(gone.rank)
        except Released:
            pass

    def _lost(self, peer: int) -> None:
        if not faults.sticky.silent and not self.async_error:
            self.async_error = faults.remote_error(
                f"socketProgress: Connection closed by remote peer node-{peer}<{50000 + peer}>"
            )

    def _finished(self, operation: Operation) -> None:
        operation.completed_ns = time.time_ns()
        operation.done = True
        self._release(operation)

    def _release(self, operation: Operation) -> None:
        with self._lock:
            if operation in self.pending:
                self.pending.remove(operation)
            due = [future for of, future in self._promised if of is operation]
            self._promised = [each for each in self._promised if each[0] is not operation]
        operation.gate.open()
        for future in due:
            future.set_result(operation.outputs)

    def promise(self, operation: Operation, future: Any) -> None:
        with self._lock:
            if not operation.gate.is_open:
                self._promised.append((operation, future))
                return
        future.set_result(operation.outputs)

    # --- abort ---------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Release whoever waits. What they get is garbage, and no error says so."""
        if self._abort_hangs:
            Gate().wait()
        self.aborted = True
        if self._mesh is not None:
            self._mesh.release()
        for operation in list(self.pending):
            _spoil(operation.outputs)
            self._release(operation)


def _spoil(tensors: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor in tensors:
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
