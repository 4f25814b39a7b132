"""Maps an error message to a failure class and a hint.

The messages come from torch, NCCL, Gloo and the CUDA driver. They rarely change between versions, so plain substrings
of the lower-cased message are enough. One question needs care: does the error only report that a peer is lost? Gloo,
NCCL and the store have specific phrases for it. If these libraries raise the type of the exception, a phrase may be
anywhere in the message. "Connection reset by peer" alone counts only if the failed call belongs to torch.distributed: a
data loader that loses the connection to a web server is a separate cause.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from launcher.failure import device_symptoms
from launcher.failure.hidden_modules import hint_of_hidden
from rendezvous.values.types import FailureClass

if TYPE_CHECKING:
    from collections.abc import Mapping

    from launcher.failure.crash_text import Raised

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
    "gloo/transport",
    "gloo/rendezvous",
    "connection was likely closed. did the remote server",
    "failed to recv, got 0 bytes",
    "remote process exited or there was a network error",
    "ncclremoteerror",
    "connection closed by remote peer",
    "nccl communicator was aborted",
    "nccl communicator aborted",
    "watchdog caught collective operation timeout",
    "application timeout caused pair closure",
    "failed to pass monitoredbarrier",
    "wait timeout after",
    "store->get",
    "remote_error",
    "died (noticed by rank",
    "has left the process group; this rank",
    "has not joined",
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
        "a DataLoader worker was killed, usually because memory ran out: use fewer workers",
    ),
    (
        "is killed by signal: bus error",
        "/dev/shm is probably too small for the DataLoader (docker: --shm-size=8g)",
    ),
    (
        "can't allocate memory",
        "this node has too little memory for its ranks: use fewer ranks or a smaller batch",
    ),
    ("address already in use", "another process uses that port: use port 0 for any free port"),
    ("eaddrinuse", "another process uses that port: without --master-port the launcher chooses a free one"),
    ("nccl", "set NCCL_DEBUG=INFO to see more; NCCL_SOCKET_IFNAME selects the network interface"),
    (
        "expected to have finished reduction",
        "some parameters got no gradient: set find_unused_parameters=True",
    ),
    ("bad file descriptor", "the script closed a descriptor of a library, for example with os.closerange"),
    ("too many open files", "raise the limit of open files, for example with ulimit -n 65536"),
    ("invalid device ordinal", "this node has more ranks than visible GPUs: use a smaller --nproc-per-node"),
    ("name or service not known", "this node cannot resolve that host name: check /etc/hosts or DNS"),
    ("trying to connect", "check from this node that the host is up and that the firewall opens its port"),
    ("connection refused", "no process listens at that address, or a firewall rejects the connection"),
)


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
    known = device_symptoms.symptom(words) if in_collective or _any(words, _OF_DEVICES) else None
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


_MARKS = "/telemetry/collective_marks.py"  # our wrapper of torch's functions


def _called_distributed(raised: Raised) -> bool:
    called = [file for file in raised.files if not file.endswith(_MARKS)]
    return bool(called) and "/torch/distributed/" in called[-1]


def hint_of(raised: Raised, hiding: Mapping[str, str] = _NOTHING) -> str:
    """`hiding`: the names of modules that the user's files hide, with these files."""
    if raised.parts:
        return hint_of(raised.parts[0], hiding)
    if hidden := hint_of_hidden(raised, hiding):
        return hidden
    words = raised.message.lower()
    if raised.short_type in ("ModuleNotFoundError", "ImportError"):
        return _import_hint(raised.message)
    if "no space left on device" in words and not is_of_library(raised):
        return _space_hint(raised)
    if raised.short_type == "OutOfMemoryError":
        words = "cuda out of memory " + words
    plain = next((hint for needle, hint in _HINTS if needle in words), "")
    known = device_symptoms.symptom(words) if is_of_library(raised) else None
    return known.hint if known is not None and not _any(words, _MEMORY) else plain


_IN_SHARED_MEMORY = (
    "/dev/shm",
    "/multiprocessing/synchronize.py",
    "/multiprocessing/shared_memory.py",
    "/multiprocessing/heap.py",
)


def _space_hint(raised: Raised) -> str:
    """The error of a lock or of shared memory contains no path, so the files of its traceback are searched too."""
    places = (*raised.files, *raised.message.splitlines())
    if any(_any(place, _IN_SHARED_MEMORY) for place in places):
        return "/dev/shm is full: df -h /dev/shm shows its size (docker: --shm-size=8g, or --ipc=host)"
    return "a disk, or /dev/shm, is full: df -h shows which one"


def is_known(raised: Raised) -> bool:
    """Whether a library's error is one that these tables know; the class of any other error is only the default."""
    words = raised.message.lower()
    phrases = (*_MEMORY, *_REACH, *_PEER_GONE)
    return is_of_library(raised) and (device_symptoms.symptom(words) is not None or _any(words, phrases))


def may_be_at_peer(raised: Raised) -> bool:
    """Whether the fault may be at the other end of a connection: the rank that reports it cannot know."""
    if class_of(raised) is not FailureClass.NETWORK:
        return False
    return is_of_library(raised) and device_symptoms.is_between_two(raised.message.lower())


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
    return is_of_library(raised) and device_symptoms.is_mismatch(raised.message.lower())


def is_of_library(raised: Raised) -> bool:
    """Whether torch or one of its libraries raises this type; a user's code may raise RuntimeError, too."""
    return raised.type in _LIBRARY_TYPES or raised.short_type in _LIBRARY_TYPES


def _import_hint(message: str) -> str:
    missing = re.search(r"No module named '([^']+)'", message)
    if missing is None:
        return ""
    return f"check that {missing[1].partition('.')[0]} is installed for the Python that runs the ranks"


def _any(words: str, needles: tuple[str, ...]) -> bool:
    return any(needle in words for needle in needles)
