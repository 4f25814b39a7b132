"""What can be broken in the communicator of this rank: once, at the next operation of any group."""

from __future__ import annotations

from dataclasses import dataclass, field

from . import nccl_text


@dataclass
class Fault:
    """`error`: what the communicator reports. The other fields say how, and what else is wrong."""

    error: str = ""  # the text of an asynchronous error; "" for none
    raises: str = ""  # the text of an error that the call itself raises
    cuda: str = ""  # a CUDA error that the watchdog finds when it queries an event
    leaves: bool = False  # closes its connections: the peers find that out
    silent: bool = False  # as over NVLink: peers do not notice that this rank has gone
    hangs: bool = False  # the operation never completes
    init_hangs: bool = False  # nor does the creation of the communicator
    abort_hangs: bool = False
    watchdog_hangs: bool = False
    warnings: tuple[str, ...] = field(default=())  # what NCCL_DEBUG=WARN prints before


_armed: list[Fault] = []
sticky = Fault()  # what stays wrong with this rank


def break_down(fault: Fault) -> None:
    _armed.append(fault)


def taken() -> Fault | None:
    return _armed.pop() if _armed else None


def system_error(last: str) -> str:
    return nccl_text.failed("ncclSystemError", last)


def remote_error(last: str) -> str:
    return nccl_text.failed("ncclRemoteError", last)


def internal_error(last: str) -> str:
    return nccl_text.failed("ncclInternalError", last)


def invalid_usage(last: str) -> str:
    return nccl_text.failed("ncclInvalidUsage", last)


def cuda_error(last: str) -> str:
    return nccl_text.failed("ncclUnhandledCudaError", last)
