"""Maps an error message to a failure class and a hint.

The messages come from torch, NCCL, Gloo and the CUDA driver. They rarely change between versions, so plain substrings
of the lower-cased message are enough. One question needs care: does the error only report that a peer is lost? Gloo,
NCCL and the store have specific phrases for it. If these libraries raise the type of the exception, a phrase may be
anywhere in the message. "Connection reset by peer" alone counts only if the failed call belongs to torch.distributed: a
data loader that loses the connection to a web server is a separate cause.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum

from launcher.failure.crash_text import Raised, clean_lines, hint_of_hidden, last_raised
from launcher.machine.xids import XIDS, XidOrigin, xid_in
from rendezvous.values.cause_text import OUT_OF_TIME_IN_A_LIBRARY
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.types import FailureClass
from rendezvous.values.types import FailureClass as Class

_NOTHING: Mapping[str, str] = {}
# Types that torch, c10d, NCCL and Gloo raise. A user's own type that quotes their messages is not one of them.
_LIBRARY_TYPES = frozenset(
    "RuntimeError AcceleratorError OutOfMemoryError "
    "DistBackendError DistNetworkError DistStoreError DistError DistQueueEmptyError "
    "c10::Error c10::DistError c10::DistBackendError c10::DistNetworkError c10::DistStoreError "
    "c10::AcceleratorError c10::OutOfMemoryError std::runtime_error std::system_error "
    "gloo::IoException gloo::TimeoutException gloo::EnforceNotMet gloo::Exception".split()
)
_NETWORK_TYPES = frozenset(
    "ConnectionResetError ConnectionRefusedError ConnectionAbortedError ConnectionError gaierror herror "
    "URLError MaxRetryError NewConnectionError ConnectTimeout ReadTimeout ConnectTimeoutError ProtocolError "
    "SSLError".split()
)
# What a call on a connection raises if the other end has closed it.
_CLOSED_TYPES = frozenset(
    "ConnectionResetError ConnectionAbortedError BrokenPipeError IncompleteReadError".split()
)
_CLOSED_WORDS = tuple(
    "peer connection socket closed remote pipe hung disconnect rank worker server client".split()
)
# Their peers are services and processes of the rank itself, not ranks.
_CLIENTS = (
    "/http/ /urllib /requests/ /aiohttp/ /httpx/ /httpcore/ /botocore/ /ssl.py /subprocess.py /fsspec/ "
    "/concurrent/futures/ /torch/utils/data/ /torch/multiprocessing/"
).split()
_OF_DEVICES = ("cuda", "gpu", "nvidia", "nccl", "hip error", "gloo", "c10d", "xid")
_MEMORY = (
    "cuda out of memory",
    "hip out of memory",
    "xpu out of memory",
    "cuda error: out of memory",
    "'out of memory'",  # as NCCL quotes CUDA
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory: you tried to allocate",
    "cublas_status_alloc_failed",
    "insufficient shared memory (shm)",
    "is killed by signal: killed",
    "bad_alloc",
)
_REACH = (
    "eaddrinuse",
    "address already in use",
    "trying to connect",
    "failed to connect",
    "connection refused",
    "no route to host",
    "network is unreachable",
    "name or service not known",
    "name resolution",
    "unable to find address for",
    "unable to resolve hostname",
    "ncclsystemerror",
    "unhandled system error",
)
# Of descriptors of this process: the script has closed those of a library, or opened too many.
_OF_DESCRIPTORS = ("bad file descriptor", "too many open files")
# Phrases that only these libraries use, about a lost peer.
_PEER_GONE = (
    *OUT_OF_TIME_IN_A_LIBRARY,
    "gloo/transport",
    "gloo/rendezvous",
    "connection was likely closed. did the remote server",
    "failed to recv, got 0 bytes",
    "remote process exited or there was a network error",
    "ncclremoteerror",
    "connection closed by remote peer",
    "nccl communicator was aborted",
    "nccl communicator aborted",
    "application timeout caused pair closure",
    "store->get",
    "remote_error",
    "died (noticed by rank",
    "has left the process group; this rank",
    "aborted the process group; this rank",
    "the launcher aborted communication",
    "lost its connection to rank",
    "interrupted rank",
)
_PEER_GONE_IN_COLLECTIVE = (
    "connection reset by peer",
    "connection closed by peer",
    "broken pipe",
    "socket timeout",
    "socket closed",
    "timed out waiting",
)
_TENSORPIPE = "originated at tensorpipe/"  # an error of torch.distributed.rpc
_HINTS = (
    (
        "insufficient shared memory",
        "/dev/shm is too small: use docker run --shm-size=8g, or fewer DataLoader workers",
    ),
    (
        "cuda out of memory",
        "use a smaller batch per rank, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    ),
    (
        "is killed by signal: killed",
        "a DataLoader worker was killed: if memory ran out, use fewer workers",
    ),
    (
        "is killed by signal: bus error",
        "/dev/shm is probably too small for the DataLoader (docker: --shm-size=8g)",
    ),
    (
        "can't allocate memory",
        "use fewer ranks or a smaller batch; ulimit -v and the cgroup also limit the memory",
    ),
    ("address already in use", "a process uses that port already: use port 0 for any free port"),
    ("eaddrinuse", "a process uses that port already: without --master-port the launcher chooses a free one"),
    ("nccl", "set NCCL_DEBUG=INFO to see more; NCCL_SOCKET_IFNAME selects the network interface"),
    (
        "expected to have finished reduction",
        "if some parameters got no gradient, set find_unused_parameters=True",
    ),
    (
        "bad file descriptor",
        "a descriptor that a library uses is closed: look for os.close or os.closerange in the script",
    ),
    ("too many open files", "raise the limit of open files, for example with ulimit -n 65536"),
    (
        "invalid device ordinal",
        "the rank chose a GPU that it cannot see: compare --nproc-per-node with the visible GPUs",
    ),
    ("name or service not known", "this node cannot resolve that host name: check /etc/hosts or DNS"),
    ("trying to connect", "check from this node that the host is up and that the firewall opens its port"),
    ("connection refused", "no process listens at that address, or a firewall rejects the connection"),
)


def is_consequence(traceback: bytes) -> bool:
    """Whether a traceback only says that a peer is gone."""
    crash = last_raised(clean_lines(traceback.decode("utf-8", "replace")))
    return crash is not None and all(class_of(each) is FailureClass.CONSEQUENCE for each in crash.chain[-1:])


def class_of(raised: Raised) -> FailureClass:
    if raised.parts:
        classes = [class_of(part) for part in raised.parts]
        own = [c for c in classes if c is not FailureClass.CONSEQUENCE]
        return own[0] if own else FailureClass.CONSEQUENCE
    if raised.type == "ddp.CommError":
        return FailureClass.CONSEQUENCE  # unless an exception in its chain has another class
    words = raised.message.lower()
    if raised.short_type.endswith("MemoryError") or _any(words, _MEMORY):
        return FailureClass.OUT_OF_MEMORY
    if is_of_library(raised):
        return _library_class(raised, words)
    return _python_class(raised, words)


def _library_class(raised: Raised, words: str) -> FailureClass:
    by_type = raised.short_type.rpartition("::")[2]
    in_collective = by_type.startswith("Dist") or _called_distributed(raised)
    known = symptom(words) if in_collective or _any(words, _OF_DEVICES) else None
    if known is not None:
        return known.failure
    if _any(words, _OF_DESCRIPTORS):
        return FailureClass.USER_EXCEPTION
    if _any(words, _REACH) and (in_collective or _any(words, ("gloo", "nccl", "c10d", "socket"))):
        return FailureClass.NETWORK
    if _any(words, _PEER_GONE) or (in_collective and _any(words, _PEER_GONE_IN_COLLECTIVE)):
        return FailureClass.CONSEQUENCE
    if by_type == "DistNetworkError":
        return FailureClass.CONSEQUENCE
    return FailureClass.USER_EXCEPTION


def _python_class(raised: Raised, words: str) -> FailureClass:
    deepest = raised.deepest_file
    if _called_distributed(raised) and _any(words, _PEER_GONE_IN_COLLECTIVE):
        return FailureClass.CONSEQUENCE
    if deepest.endswith("multiprocessing/connection.py"):
        return FailureClass.USER_EXCEPTION  # a pipe to a process on the same node
    if raised.short_type in _NETWORK_TYPES or (raised.short_type == "OSError" and _any(words, _REACH)):
        return FailureClass.NETWORK
    return FailureClass.USER_EXCEPTION


def _called_distributed(raised: Raised) -> bool:
    return bool(raised.files) and "/torch/distributed/" in raised.files[-1]


def hint_of(raised: Raised, hiding: Mapping[str, str] = _NOTHING) -> str:
    """`hiding`: the names of modules that the user's files hide, with these files."""
    if raised.parts:
        return hint_of(raised.parts[0], hiding)
    if hidden := hint_of_hidden(raised, hiding):
        return hidden
    words = raised.message.lower()
    if raised.short_type in ("ModuleNotFoundError", "ImportError"):
        missing = re.search(r"No module named '([^']+)'", raised.message)
        if missing is None:
            return ""
        return f"check that {missing[1].partition('.')[0]} is installed for the Python that runs the ranks"
    if "no space left on device" in words and not is_of_library(raised):
        # The error of a lock or of shared memory contains no path, so the files of its traceback are searched too.
        places = (*raised.files, *raised.message.splitlines())
        if any(_any(place, _IN_SHARED_MEMORY) for place in places):
            return "/dev/shm is full: df -h /dev/shm shows its size (docker: --shm-size=8g, or --ipc=host)"
        return "a disk, or /dev/shm, is full: df -h shows which one"
    if raised.short_type == "OutOfMemoryError":
        words = "cuda out of memory " + words
    plain = next((hint for needle, hint in _HINTS if needle in words), "")
    known = symptom(words) if is_of_library(raised) else None
    return known.hint if known is not None and not _any(words, _MEMORY) else plain


_IN_SHARED_MEMORY = (
    "/dev/shm",
    "/multiprocessing/synchronize.py",
    "/multiprocessing/shared_memory.py",
    "/multiprocessing/heap.py",
)


def is_known(raised: Raised) -> bool:
    """Whether a library's error is one that these tables know; the class of any other error is only the default."""
    words = raised.message.lower()
    phrases = (*_MEMORY, *_REACH, *_PEER_GONE)
    return is_of_library(raised) and (symptom(words) is not None or _any(words, phrases))


def may_be_at_peer(raised: Raised) -> bool:
    """Whether the fault may be at the other end of a connection: the rank that reports it cannot know."""
    if class_of(raised) is not FailureClass.NETWORK:
        return False
    return is_of_library(raised) and is_between_two(raised.message.lower())


def is_lost_peer(raised: Raised) -> bool:
    """Whether the rank has lost a connection of its own: a consequence, if a rank at the other end failed before.

    Files raise EOFError, too. A data loader that loses its web server fails by itself.
    """
    words = raised.message.lower()
    if any(client in file for file in raised.files for client in _CLIENTS):
        return False
    if raised.short_type == "EOFError":
        is_pipe = raised.deepest_file.endswith("multiprocessing/connection.py")
        return is_pipe or not words or _any(words, _CLOSED_WORDS)
    return raised.short_type in _CLOSED_TYPES or (is_of_library(raised) and _TENSORPIPE in words)


def is_mismatch_error(raised: Raised) -> bool:
    """Whether the ranks called different collectives. The error of one rank does not show which rank is wrong."""
    return is_of_library(raised) and is_mismatch(raised.message.lower())


def is_of_library(raised: Raised) -> bool:
    """Whether torch or one of its libraries raises this type; a user's code may raise RuntimeError, too."""
    return raised.type in _LIBRARY_TYPES or raised.short_type in _LIBRARY_TYPES


def _any(words: str, needles: tuple[str, ...]) -> bool:
    return any(needle in words for needle in needles)


# --- symptoms of devices and networks --------------------------------------------------------------
#
# Maps error messages of NCCL, CUDA, network drivers and Gloo to a failure class and a hint.
#
# --failure-policy sets the action of each class. The field `restart` holds the action that the message suggests:
# RESTART, EXCLUDE (restart without the node, as with hardware=exclude), or FAIL (a restart would fail in the same
# way, as with user-exception=fail). The first entry that matches a message applies. The
# documentation site shows this table.


class SuggestedAction(StrEnum):
    RESTART = "restart"
    EXCLUDE = "exclude"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Symptom:
    phrases: tuple[str, ...]  # lower case; any of them matches
    failure: Class
    restart: SuggestedAction
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
        SuggestedAction.FAIL,
        "ranks called different collectives, or one collective with different shapes or types: compare their calls",
    ),
    Symptom(
        ("duplicate gpu detected",),
        Class.USER_EXCEPTION,
        SuggestedAction.FAIL,
        "two ranks use one GPU: call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before init_process_group",
    ),
    Symptom(
        ("ncclinvalidusage", "ncclinvalidargument"),
        Class.USER_EXCEPTION,
        SuggestedAction.FAIL,
        "NCCL rejected the arguments of a call: set NCCL_DEBUG=WARN to see the reason",
    ),
    Symptom(
        ("device-side assert triggered",),
        Class.USER_EXCEPTION,
        SuggestedAction.FAIL,
        "usually an index or label out of range: set CUDA_LAUNCH_BLOCKING=1 to see the line",
    ),
    Symptom(
        ("illegal memory access", "misaligned address"),
        Class.USER_EXCEPTION,
        SuggestedAction.FAIL,
        "set CUDA_LAUNCH_BLOCKING=1 to see the line; compute-sanitizer finds the access",
    ),
    Symptom(
        ("unspecified launch failure", "hardware stack error"),
        Class.USER_EXCEPTION,
        SuggestedAction.FAIL,
        "usually a faulty CUDA kernel: compute-sanitizer finds it. If the same node fails again, look for Xid errors "
        "in dmesg on that node",
    ),
    # --- memory of this node
    Symptom(
        (
            "creating shared memory segment",
            "shm_open",
            "failed to extend /dev/shm",
            "posix_fallocate failed",
        ),
        Class.OUT_OF_MEMORY,
        SuggestedAction.RESTART,
        "/dev/shm is too small: use docker run --shm-size=8g (or --ipc=host)",
    ),
    Symptom(
        ("no space left on device",),
        Class.OUT_OF_MEMORY,
        SuggestedAction.RESTART,
        "/dev/shm or a disk is full: df -h shows which one (docker: --shm-size=8g, or --ipc=host)",
    ),
    Symptom(
        ("ibv_reg_mr", "fi_mr_reg"),
        Class.NETWORK,
        SuggestedAction.EXCLUDE,
        _LOCKED,
    ),
    # --- a device
    Symptom(
        ("fallen off the bus", "rminitadapter failed", "nv_err_reset_required"),
        Class.HARDWARE,
        SuggestedAction.EXCLUDE,
        f"the driver has lost the GPU or cannot start it: {_DMESG}",
    ),
    Symptom(
        ("nvlink", "nvswitch", "fabric manager", "system not yet initialized"),
        Class.HARDWARE,
        SuggestedAction.EXCLUDE,
        "check nvidia-smi nvlink --status and the fabric manager service on that node",
    ),
    Symptom(
        ("uncorrectable", "ecc error", "row remap"),
        Class.HARDWARE,
        SuggestedAction.EXCLUDE,
        f"the GPU reports errors of its memory: {_DMESG}",
    ),
    Symptom(
        ("launch timed out and was terminated",),
        Class.HARDWARE,
        SuggestedAction.EXCLUDE,
        "the driver has ended a CUDA kernel: look for Xid errors in dmesg on that node, which say more",
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
        SuggestedAction.EXCLUDE,
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
        SuggestedAction.RESTART,
        "a peer or the network failed before this rank: look for the first cause in another rank",
    ),
    Symptom(
        ("watchdog caught collective operation timeout", "timed out in blocking wait"),
        Class.CONSEQUENCE,
        SuggestedAction.RESTART,
        "a rank did not take part in time, or the network is down: see the flight recorder dumps in the log directory",
    ),
    # --- the network
    Symptom(
        ("with status=12", "with error 12,", "retry_exc", "transport retry counter exceeded"),
        Class.NETWORK,
        SuggestedAction.RESTART,
        "no answer from a peer over InfiniBand/RoCE: check its port, cable and switch (ibstat, perfquery)",
        between=True,
    ),
    Symptom(
        ("got completion from peer", "wr_flush", "ibv_modify_qp", "failed to modify qp"),
        Class.NETWORK,
        SuggestedAction.RESTART,
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
        SuggestedAction.EXCLUDE,
        "an InfiniBand/RoCE error on this node: run ibstat, and look for mlx5 messages in dmesg",
    ),
    Symptom(
        ("net/ofi request", "fi_cq_readerr"),
        Class.NETWORK,
        SuggestedAction.RESTART,
        "EFA/libfabric reports an error of a connection: run fi_info -p efa on both nodes; the AWS security group must "
        "allow all traffic from and to itself",
        between=True,
    ),
    Symptom(
        ("net/ofi couldn't", "net/ofi creating", "net/ofi unable", "efa provider"),
        Class.NETWORK,
        SuggestedAction.EXCLUDE,
        "EFA/libfabric cannot be used on this node: run fi_info -p efa, and check the versions of libfabric and "
        "aws-ofi-nccl",
    ),
    Symptom(
        ("no socket interface found", "network is down", "no such device or address"),
        Class.NETWORK,
        SuggestedAction.EXCLUDE,
        _INTERFACE,
    ),
    Symptom(
        ("no route to host", "network is unreachable"),
        Class.NETWORK,
        SuggestedAction.RESTART,
        "nodes cannot reach each other: " + _INTERFACE,
        between=True,
    ),
    Symptom(
        ("ncclsystemerror", "unhandled system error", "socketstartconnect", "socketpollconnect"),
        Class.NETWORK,
        SuggestedAction.RESTART,
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
        and meaning.origin in (XidOrigin.DEVICE, XidOrigin.LINK)
        and not _NON_FATAL.search(words)
    ):
        return Symptom((), Class.HARDWARE, SuggestedAction.EXCLUDE, f"Xid {number}: {meaning.text}: {_DMESG}")
    return next((each for each in TABLE if each.fits(words)), None)


def is_between_two(words: str) -> bool:
    known = symptom(words)
    return known is not None and known.between


def is_mismatch(words: str) -> bool:
    return TABLE[0].fits(words)
