"""What goes wrong in the communicator of a rank: commands to the backend of tests/nccl, which behaves as NCCL does.

The fault is armed here, and strikes at the next collective of this rank, so the loop goes on as it always does.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

from nccl_like import Fault, break_down
from nccl_like.faults import internal_error, invalid_usage, remote_error, sticky, system_error

if TYPE_CHECKING:
    from train import Scene

_NIC = "NET/IB : mlx5_0:1 Got async event : port error"
_NO_ANSWER = (
    "NET/IB: Got completion from peer 10.0.0.5<40000> with status=12 opcode=0 len=0 vendor err 129 (Recv)"
)


def nccl_port_error(_scene: Scene) -> None:
    """The network card of this rank fails: its peers find their connections closed."""
    break_down(Fault(system_error(_NIC), leaves=True, warnings=(_NIC,)))


def nccl_port_error_unprinted(_scene: Scene) -> None:
    """The same, and torch's logger is off: only the state of the group shows the error."""
    sys.stderr.flush()
    os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
    nccl_port_error(_scene)


def nccl_port_error_and_abort_hangs(_scene: Scene) -> None:
    break_down(Fault(system_error(_NIC), leaves=True, abort_hangs=True))


def nccl_port_error_in_a_checkpoint(scene: Scene) -> bool:
    """All ranks make a checkpoint of `ddp.elastic` together, and one of them loses its network card meanwhile."""
    import torch

    from ddp import elastic

    state = elastic.State(weights=torch.ones(1 << 10), folder=scene.folder / "commits")
    state.resume()
    if scene.rank == 1:
        nccl_port_error(scene)
    state.checkpoint()
    return True


def nccl_port_error_in_a_group(scene: Scene) -> bool:
    import torch
    import torch.distributed as dist

    if scene.rank == 1:
        nccl_port_error(scene)
    dist.all_reduce(torch.zeros(4), group=scene.pairs[0])
    return True


def nccl_no_answer(_scene: Scene) -> None:
    """The other end does not answer any more: this rank cannot know which of the two is at fault."""
    break_down(Fault(system_error(_NO_ANSWER), leaves=True))


def nccl_lost_link(_scene: Scene) -> None:
    """A connection breaks, both processes live, and only this rank notices."""
    break_down(Fault(remote_error("socketProgress: Connection closed by remote peer node-2<50002>")))


def nccl_internal_error(_scene: Scene) -> None:
    break_down(Fault(internal_error("proxyState 1 inconsistent")))


def nccl_invalid_usage(_scene: Scene) -> None:
    break_down(
        Fault(raises=invalid_usage("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1a000"))
    )


def nccl_illegal_access(_scene: Scene) -> None:
    """A kernel of this rank fails. The process lives for as long as torch's exception takes."""
    break_down(Fault(cuda="an illegal memory access was encountered", leaves=True))


def nccl_ecc(_scene: Scene) -> None:
    break_down(Fault(cuda="uncorrectable ECC error encountered", leaves=True))


def nccl_init_hangs(_scene: Scene) -> None:
    sticky.init_hangs = True


def nccl_init_fails(_scene: Scene) -> None:
    sticky.raises = system_error("Bootstrap : no socket interface found")


def nccl_watchdog_hangs(_scene: Scene) -> None:
    """A call of CUDA in the watchdog thread does not return, and the operation does not complete."""
    break_down(Fault(hangs=True, watchdog_hangs=True))


def nccl_dies_slowly(_scene: Scene) -> None:
    """Its peers notice at once, and the process itself takes a while to end."""
    break_down(Fault(leaves=True, hangs=True))
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGSEGV)).start()


def nccl_is_silent(_scene: Scene) -> None:
    """Errors of peers do not reach this rank, as over NVLink and shared memory."""
    sticky.silent = True


def nccl_sleeps(_scene: Scene) -> None:
    time.sleep(10_000)
