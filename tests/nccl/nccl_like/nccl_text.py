"""The messages of NCCL and of ProcessGroupNCCL, as torch 2.8 to 2.13 print them."""

from __future__ import annotations

import os
import sys
import time

VERSION = "2.27.5"
_SOURCE = "ProcessGroupNCCL.cpp"
_KINDS = {  # by result: ncclGetErrorString, and what torch adds
    "ncclUnhandledCudaError": (
        "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        "Call to CUDA function failed.",
    ),
    "ncclSystemError": (
        "unhandled system error (run with NCCL_DEBUG=INFO for details)",
        "System call (e.g. socket, malloc) or external library call failed or device error. ",
    ),
    "ncclInternalError": (
        "internal error - please report this issue to the NCCL developers",
        "Internal check failed.",
    ),
    "ncclInvalidUsage": (
        "invalid usage (run with NCCL_DEBUG=WARN for details)",
        "This usually reflects invalid usage of NCCL library.",
    ),
    "ncclRemoteError": (
        "remote process exited or there was a network error",
        "A call failed possibly due to a network error or a remote process exiting prematurely.",
    ),
}


def failed(result: str, last: str) -> str:
    short, long = _KINDS[result]
    return f"NCCL error: {short}, NCCL version {VERSION}\n{result}: {long}\nLast error:\n{last}"


def in_short(text: str) -> str:
    """As nccl2 logs it: what ncclGetErrorString returns."""
    return text.removeprefix("NCCL error: ").partition(", NCCL version")[0]


def raised_in_call(text: str) -> str:
    """The same error where a call of NCCL returns it."""
    where = f"NCCL error in: /pytorch/torch/csrc/distributed/c10d/{_SOURCE}:3699, "
    return where + text.removeprefix("NCCL error: ")


def work(sequence: int, op: str, numel_in: int, numel_out: int, timeout_ms: int) -> str:
    numbers = f"NumelIn={numel_in}, NumelOut={numel_out}, Timeout(ms)={timeout_ms}"
    return f"WorkNCCL(SeqNum={sequence}, OpType={op}, {numbers})"


def timed_out(rank: int, what: str, ran_ms: int) -> str:
    return (
        f"[Rank {rank}] Watchdog caught collective operation timeout: {what} ran for {ran_ms} milliseconds "
        "before timing out."
    )


def aborted(rank: int) -> str:
    return f"NCCL communicator was aborted on rank {rank}. "


def cuda(text: str) -> str:
    return (
        f"CUDA error: {text}\nCUDA kernel errors might be asynchronously reported at some other API call, so the "
        "stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
    )


def frames(function: str, line: int) -> str:
    """The first frames that a C++ exception of torch prints."""
    return (
        f"Exception raised from {function} at /pytorch/torch/csrc/distributed/c10d/{_SOURCE}:{line} "
        "(most recent call first):\n"
        "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x80 (0x7f9c0697fb80 in libc10.so)\n"
        "frame #1: c10d::ProcessGroupNCCL::Watchdog::run() + 0x105 (0x7f9bb4e5b1f5 in libtorch_cuda.so)\n"
    )


def log(level: str, line: int, text: str) -> None:
    """Write to stderr as c10's logger does."""
    now = time.time()
    clock = time.strftime("%m%d %H:%M:%S", time.localtime(now)) + f".{int(now % 1 * 1e9):09d}"
    _write(f"[rank{os.environ.get('RANK', '0')}]:[{level}{clock} {_SOURCE}:{line}] {text}\n")


def warn(text: str) -> None:
    """Write as NCCL_DEBUG=WARN does."""
    pid = os.getpid()
    _write(f"{os.uname().nodename}:{pid}:{pid + 40} [0] NCCL WARN {text}\n")


def terminate(what: str) -> None:
    """An exception leaves a thread of C++: the process ends by SIGABRT."""
    _write(f"terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  {what}\n")
    os.abort()


def _write(text: str) -> None:
    sys.stderr.flush()
    os.write(2, text.encode())
