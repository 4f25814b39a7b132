"""Maps error messages of NCCL, CUDA, network drivers and Gloo to a failure class and a hint.

--failure-policy sets the action of each class. The field `restart` holds the action that the message suggests: RESTART,
EXCLUDE (restart without the node, as with hardware=exclude), or FAIL (a restart would fail in the same way, as with
user-exception=fail). The first entry that matches a message applies. docs/communication-errors.md shows this table.
"""

from __future__ import annotations

import re
from enum import StrEnum

from launcher.machine.xids import XIDS, Origin, xid_in
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.types import FailureClass as Class


class Restart(StrEnum):
    RESTART = "restart"
    EXCLUDE = "exclude"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Symptom:
    phrases: tuple[str, ...]  # lower case; any of them matches
    failure: Class
    restart: Restart
    hint: str
    between: bool = (
        False  # an error of a connection: the rank that reports it cannot know which end is at fault
    )

    def fits(self, words: str) -> bool:
        return any(phrase in words for phrase in self.phrases)


_DMESG = "look for Xid errors in dmesg on that node, then take the node out of service"
_LOCKED = (
    "the limit on locked memory is too small for RDMA: set ulimit -l unlimited (docker: --ulimit memlock=-1)"
)
_INTERFACE = "check that the interface of NCCL_SOCKET_IFNAME or --interface is up on this node"

TABLE: tuple[Symptom, ...] = (
    # --- the script, on every node
    Symptom(
        (
            "collective mismatch",
            "doesn't match expected size",
            "members disagree about",
            "the ranks disagree: ",
        ),
        Class.USER_EXCEPTION,
        Restart.FAIL,
        "ranks called different collectives, or one collective with different shapes or types: compare their calls",
    ),
    Symptom(
        ("duplicate gpu detected",),
        Class.USER_EXCEPTION,
        Restart.FAIL,
        "two ranks use one GPU: call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before init_process_group",
    ),
    Symptom(
        ("ncclinvalidusage", "ncclinvalidargument"),
        Class.USER_EXCEPTION,
        Restart.FAIL,
        "NCCL rejected the arguments of a call: set NCCL_DEBUG=WARN to see the reason",
    ),
    Symptom(
        ("device-side assert triggered",),
        Class.USER_EXCEPTION,
        Restart.FAIL,
        "usually an index or label out of range: set CUDA_LAUNCH_BLOCKING=1 to see the line",
    ),
    Symptom(
        ("illegal memory access", "misaligned address"),
        Class.USER_EXCEPTION,
        Restart.FAIL,
        "set CUDA_LAUNCH_BLOCKING=1 to see the line; compute-sanitizer finds the access",
    ),
    Symptom(
        ("unspecified launch failure", "hardware stack error"),
        Class.USER_EXCEPTION,
        Restart.FAIL,
        "usually a faulty CUDA kernel: compute-sanitizer finds it. If the same node fails again, look for Xid errors "
        "in dmesg on that node",
    ),
    # --- memory of this node
    Symptom(
        (
            "creating shared memory segment",
            "no space left on device",
            "shm_open",
            "failed to extend /dev/shm",
            "posix_fallocate failed",
        ),
        Class.OUT_OF_MEMORY,
        Restart.RESTART,
        "/dev/shm is too small: use docker run --shm-size=8g (or --ipc=host)",
    ),
    Symptom(
        ("ibv_reg_mr", "fi_mr_reg"),
        Class.NETWORK,
        Restart.EXCLUDE,
        _LOCKED,
    ),
    # --- a device
    Symptom(
        ("fallen off the bus", "rminitadapter failed", "nv_err_reset_required"),
        Class.HARDWARE,
        Restart.EXCLUDE,
        f"the GPU no longer responds on the PCIe bus: {_DMESG}",
    ),
    Symptom(
        ("nvlink", "nvswitch", "fabric manager", "system not yet initialized"),
        Class.HARDWARE,
        Restart.EXCLUDE,
        "check nvidia-smi nvlink --status and the fabric manager service on that node",
    ),
    Symptom(
        ("uncorrectable", "ecc error", "row remap"),
        Class.HARDWARE,
        Restart.EXCLUDE,
        f"the GPU is failing: {_DMESG}",
    ),
    Symptom(
        ("launch timed out and was terminated",),
        Class.HARDWARE,
        Restart.EXCLUDE,
        "a faulty CUDA kernel or a failing GPU: look for Xid errors in dmesg on that node",
    ),
    Symptom(
        (
            "devices unavailable",
            "busy or unavailable",
            "cuda failure 999",
            "'unknown error'",
            "cuda error: unknown error",
        ),
        Class.HARDWARE,
        Restart.EXCLUDE,
        "the GPU or its driver is in a bad state: run nvidia-smi on that node to check that the driver responds",
    ),
    # --- a peer
    Symptom(
        (
            "ncclremoteerror",
            "remote process exited",
            "connection closed by remote peer",
            "remote_error",
            "call to recv from",
            "call to send to",
        ),
        Class.CONSEQUENCE,
        Restart.RESTART,
        "a peer or the network failed before this rank: look for the first cause in another rank",
    ),
    Symptom(
        ("watchdog caught collective operation timeout", "timed out in blocking wait"),
        Class.CONSEQUENCE,
        Restart.RESTART,
        "a rank is missing, or the network is down: see the flight recorder dumps in the log directory",
    ),
    # --- the network
    Symptom(
        ("with status=12", "with error 12,", "retry_exc", "transport retry counter exceeded"),
        Class.NETWORK,
        Restart.RESTART,
        "a peer stopped answering over InfiniBand/RoCE: check its port, cable and switch (ibstat, perfquery)",
        between=True,
    ),
    Symptom(
        ("got completion from peer", "wr_flush", "ibv_modify_qp", "failed to modify qp"),
        Class.NETWORK,
        Restart.RESTART,
        "an InfiniBand/RoCE connection between two nodes failed: look for the first such line of all nodes, and run "
        "ibstat on both",
        between=True,
    ),
    Symptom(
        (
            "port error",
            "local catastrophic error",
            "work queue catastrophic error",
            "work queue error",
            "local work queue operation error",
            "cq error",
            "call to ibv_get_async_event",
            "call to ibv_open",
            "call to ibv_alloc",
            "call to ibv_create",
            "call to ibv_post",
            "call to ibv_poll",
        ),
        Class.NETWORK,
        Restart.EXCLUDE,
        "an InfiniBand/RoCE error on this node: run ibstat, and look for mlx5 messages in dmesg",
    ),
    Symptom(
        ("net/ofi request", "fi_cq_readerr"),
        Class.NETWORK,
        Restart.RESTART,
        "EFA/libfabric lost a peer: run fi_info -p efa on both nodes; the AWS security group must allow all traffic "
        "from and to itself",
        between=True,
    ),
    Symptom(
        ("net/ofi couldn't", "net/ofi creating", "net/ofi unable", "efa provider"),
        Class.NETWORK,
        Restart.EXCLUDE,
        "EFA/libfabric cannot be used on this node: run fi_info -p efa, and check the versions of libfabric and "
        "aws-ofi-nccl",
    ),
    Symptom(
        ("no socket interface found", "network is down", "no such device or address"),
        Class.NETWORK,
        Restart.EXCLUDE,
        _INTERFACE,
    ),
    Symptom(
        ("no route to host", "network is unreachable"),
        Class.NETWORK,
        Restart.RESTART,
        "nodes cannot reach each other: " + _INTERFACE,
        between=True,
    ),
    Symptom(
        ("ncclsystemerror", "unhandled system error", "socketstartconnect", "socketpollconnect"),
        Class.NETWORK,
        Restart.RESTART,
        "set NCCL_DEBUG=INFO to see more; " + _INTERFACE,
        between=True,
    ),
)


_NON_FATAL = re.compile(r"\bnon-?fatal\b")  # an NVLink error that the hardware has corrected


def symptom(words: str) -> Symptom | None:
    """The first entry that matches a message in lower case."""
    number = xid_in(words)
    meaning = None if number is None else XIDS.get(number)
    if (
        meaning is not None
        and meaning.origin in (Origin.DEVICE, Origin.LINK)
        and not _NON_FATAL.search(words)
    ):
        return Symptom((), Class.HARDWARE, Restart.EXCLUDE, f"Xid {number}: {meaning.text}: {_DMESG}")
    return next((each for each in TABLE if each.fits(words)), None)


def is_between_two(words: str) -> bool:
    known = symptom(words)
    return known is not None and known.between


def is_mismatch(words: str) -> bool:
    return TABLE[0].fits(words)
