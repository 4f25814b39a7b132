"""The two threads that ProcessGroupNCCL starts for a group: the watchdog, and the monitor of its heartbeat.

The watchdog looks at the pending operations ten times per second: has the communicator an error, has an operation run
for longer than its timeout, does a query of the GPU fail? If so, it sets the error of the group, asks all ranks through
the store to write their flight recorders, waits for that, and ends the process, as TORCH_NCCL_ASYNC_ERROR_HANDLING
says. With NCCL_LIKE_2=1 it is that of nccl2, the backend `nccl` of torch 2.15: it logs two lines and aborts at once.

The monitor of the default group writes the flight recorder when a rank has asked for it, or a line arrives on the pipe.
If the watchdog hangs, or does not end the process, it does so itself.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
from enum import Enum
from typing import TYPE_CHECKING, Any

try:
    from torch._C._distributed_c10d import ErrorType
except ImportError:  # a build without NCCL of an older torch

    class ErrorType(Enum):  # type: ignore[no-redef]
        SUCCESS, TIMEOUT, COMM_ERROR, REMOTE_ERROR = range(4)


from . import faults, nccl_text
from .flight import RECORDER

if TYPE_CHECKING:
    from collections.abc import Callable

    from .stream import Communicator, Operation

_LOOK_EVERY_S = 0.1
_DUMP_KEY = "exception_dump"
_ERROR_KEY = "remote_error"
_NO_HANDLING, _TEAR_DOWN, _CLEAN_UP_ONLY, _SKIP_CLEAN_UP = range(4)


def _number(name: str, default: int) -> int:
    return int(os.environ.get(name, default))


class Watchdog:
    def __init__(self, communicator: Communicator, store: Any, place: Callable[[], tuple[str, str]]) -> None:
        self._communicator, self._store, self._place = communicator, store, place
        self._whole_store = getattr(store, "underlying_store", store)
        while hasattr(self._whole_store, "underlying_store"):
            self._whole_store = self._whole_store.underlying_store
        self.error = ErrorType.SUCCESS
        self._handling = _number("TORCH_NCCL_ASYNC_ERROR_HANDLING", _SKIP_CLEAN_UP)
        self._propagates = _number("TORCH_NCCL_PROPAGATE_ERROR", 0) == 1
        self._dumps = _number("TORCH_NCCL_DUMP_ON_TIMEOUT", 1) == 1
        self._dump_s = _number("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", 15_000) / 1000
        self._heartbeat_s = _number("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", 480)
        self._ended = threading.Event()
        self._beats = 0
        self._should_dump = False

    def start(self) -> None:
        if self._communicator.blocking_wait:
            return  # as torch: no watchdog
        threading.Thread(target=self._watch, name="pt_nccl_watchdg", daemon=True).start()
        threading.Thread(target=self._monitor, name="pt_nccl_heartbt", daemon=True).start()

    def terminate(self) -> None:
        self._ended.set()

    @property
    def _prefix(self) -> str:
        name, desc = self._place()
        guid = f"{name}({desc})" if desc not in ("", "undefined") else name
        return f"[PG ID {name} PG GUID {guid} Rank {self._communicator.rank}] "

    # --- the watchdog --------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_EVERY_S):
            if faults.sticky.watchdog_hangs:
                return
            self._beats += 1
            if self._propagates and self.error == ErrorType.SUCCESS:
                self._look_for_remote_error()
            if self._communicator.cuda_error:
                self._terminate_with(nccl_text.cuda(self._communicator.cuda_error))
            for operation in list(self._communicator.pending):
                if self._check(operation) and not self._ended.is_set():
                    self._handle(operation)

    def _look_for_remote_error(self) -> None:
        key = f"{_ERROR_KEY}:{self._place()[0]}"
        with contextlib.suppress(RuntimeError):
            if self._store.check([key]):
                (rank,) = struct.unpack("<i", self._store.get(key))
                self.error = ErrorType.REMOTE_ERROR
                nccl_text.log("E", 2085, f"{self._prefix} remote error detected from rank: {rank}")

    def _check(self, operation: Operation) -> bool:
        """Whether something is wrong with an operation; sets the error of the group."""
        rank = self._communicator.rank
        if self._communicator.async_error:
            operation.exception = self._communicator.async_error
            text = f"[Rank {rank}] Collective {operation} raised the following async exception: {operation.exception}"
            nccl_text.log("E", 568, text)
            found = ErrorType.COMM_ERROR
        else:
            ran_s = time.monotonic() - operation.enqueued_at
            if ran_s < operation.timeout_s:
                return False
            operation.exception = nccl_text.timed_out(rank, str(operation), int(ran_s * 1000))
            nccl_text.log("E", 685, operation.exception)
            found = ErrorType.TIMEOUT
        if self.error == ErrorType.SUCCESS:
            self.error = found
        return True

    def _abort_as_nccl2(self, operation: Operation) -> None:
        rank, name = self._communicator.rank, self._place()[0]
        why = "timeout - collective operation timed out"
        if self._communicator.async_error:
            error = nccl_text.in_short(operation.exception)
            why = f"error - nccl hit async error: {error}"
            nccl_text.log(
                "E", 540, f"[TC][rank={rank}][name={name}] nccl hit async error on rank {rank}: {error}"
            )
        nccl_text.log(
            "E", 610, f"[TC][rank={rank}][name={name}] Aborting process on rank {rank} due to {why}"
        )
        os.abort()

    def _handle(self, operation: Operation) -> None:
        if _number("NCCL_LIKE_2", 0):
            self._abort_as_nccl2(operation)
        sequence = operation.sequence
        text = f"{self._prefix} failure detected by watchdog at work sequence id: {sequence} PG status: last enqueued "
        nccl_text.log("E", 2252, f"{text}work: {sequence}, last completed work: {sequence - 1}")
        mine = struct.pack("<i", self._communicator.rank)
        if self._propagates:
            self._signal(self._store, f"{_ERROR_KEY}:{self._place()[0]}", mine)
        if self._dumps:
            self._should_dump = True
            self._signal(self._whole_store, _DUMP_KEY, struct.pack("<i", _number("RANK", 0)))
        self._ended.wait(4 * self._dump_s)
        if self._handling in (_TEAR_DOWN, _CLEAN_UP_ONLY):
            self._communicator.abort()
        nccl_text.log(
            "E",
            735,
            f"[Rank {self._communicator.rank}] Some NCCL operations have failed or timed out. Due to the asynchronous "
            "nature of CUDA kernels, subsequent GPU operations might run on corrupted/incomplete data.",
        )
        if self._handling in (_TEAR_DOWN, _SKIP_CLEAN_UP):
            text = "To avoid data inconsistency, we are taking the entire process down."
            nccl_text.log("E", 741, f"[Rank {self._communicator.rank}] {text}")
            self._terminate_with(operation.exception + "\n" + nccl_text.frames("checkTimeout", 685))

    def _signal(self, store: Any, key: str, value: bytes) -> None:
        with contextlib.suppress(RuntimeError):
            store.set(key, value)

    def _terminate_with(self, text: str) -> None:
        what = f"{self._prefix}Process group watchdog thread terminated with exception: {text}"
        nccl_text.log("E", 2068, what)
        nccl_text.terminate(what)

    # --- the monitor ---------------------------------------------------------------------------------

    def _monitor(self) -> None:
        pipe = _open_pipe()
        every_s = _number("TORCH_NCCL_COORD_CHECK_MILSEC", 1000) / 1000
        beats, looked_at = -1, time.monotonic()
        while not self._ended.wait(every_s):
            if pipe is not None and _has_line(pipe):
                nccl_text.log(
                    "I", 1760, f"{self._prefix}Dump signal received through pipe, triggering FR dump."
                )
                RECORDER.write()
            if self._dumps and (self._should_dump or self._is_dump_asked()):
                self._dump()
                self._die_after_dump("collective timeout or exception")
                return
            if time.monotonic() - looked_at >= self._heartbeat_s:
                if beats == self._beats:
                    text = f"ProcessGroupNCCL's watchdog got stuck for {self._heartbeat_s} seconds without making "
                    nccl_text.log(
                        "E", 1700, f"{self._prefix}{text}progress in monitoring enqueued collectives."
                    )
                    self._die_after_dump("ProcessGroupNCCL watchdog hang")
                    return
                beats, looked_at = self._beats, time.monotonic()

    def _is_dump_asked(self) -> bool:
        with contextlib.suppress(RuntimeError):
            if self._whole_store.check([_DUMP_KEY]):
                text = "Observed flight recorder dump signal from another rank via TCPStore."
                nccl_text.log("E", 1682, f"{self._prefix}{text}")
                return True
        return False

    def _dump(self) -> None:
        nccl_text.log(
            "E",
            1744,
            f"{self._prefix}Received a dump signal due to a collective timeout from this local rank",
        )
        nccl_text.log("I", 1590, f"{self._prefix}ProcessGroupNCCL dumping nccl trace to {RECORDER.write()}")

    def _die_after_dump(self, why: str) -> None:
        if self._ended.wait(self._heartbeat_s):
            return
        text = f"Terminating the process after attempting to dump debug info, due to {why}."
        nccl_text.log("F", 1560, f"{self._prefix}{text}")
        os.abort()


def _open_pipe() -> int | None:
    place = os.environ.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE")
    if not place:
        return None
    path = f"{place}{os.environ.get('RANK', '0')}.pipe"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    os.mkfifo(path)
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK)


def _has_line(pipe: int) -> bool:
    try:
        return bool(os.read(pipe, 128))
    except BlockingIOError:
        return False
