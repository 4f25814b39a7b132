"""A backend for CPU tensors that behaves towards us as ProcessGroupNCCL does, and fails on command.

Theory of operation
-------------------
`register()` makes the backend `nccl_like` known to torch. Its collectives are real: ranks of one machine exchange bytes
over Unix sockets (`mesh`). What the launcher and its guard can see of NCCL is the same here:

    stream       each group has a thread that executes its operations in order, like a CUDA stream. `wait()` blocks
                 in native code, without the GIL, and no handler of a signal runs meanwhile.
    errors       an error of a communicator is asynchronous: no call raises it. A watchdog thread finds it, sets
                 `get_error()`, writes to stderr what torch writes, waits for dumps and aborts the process (`watchdog`).
    abort        releases whoever waits. As with NCCL, the wait returns *without* an error, and the result is garbage
                 (NaN here, so that it cannot pass for a result). Later calls raise "NCCL communicator was aborted".
    recorder     the flight recorder of torch in the format of several versions (`flight`): by function, by pipe,
                 and written to a file by the watchdog.
    peers        the sockets are not TCP, so the guard cannot know which connection leads to which rank.

What it does not have: CUDA streams. A wait blocks until the result is there, where NCCL lets the CPU run ahead.

`break_down(fault, ...)` makes the communicator of this rank fail; see `faults`.
"""

from __future__ import annotations

from .faults import Fault, break_down
from .group import NcclLikeGroup, register

__all__ = ["Fault", "NcclLikeGroup", "break_down", "register"]
