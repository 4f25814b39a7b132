"""The messages between agent and zygote: frozen values, encoded to and decoded from JSON in this module only.

They are named tuples because Python creates such classes in a fraction of the time that dataclasses take, and the start
of the plain zygote is part of every launch.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable


class Spawn(NamedTuple):
    """Start a rank. The descriptors of its standard output and error are sent with the message."""

    local_rank: int
    generation: int
    argv: tuple[str, ...]
    args: tuple[str, ...] | None  # if they differ from the command line that all ranks share
    env: dict[str, str]
    cpus: tuple[int, ...]
    has_group: bool  # signals go to its whole process group
    is_store_kept: bool
    is_python: bool = True  # False: a program of any kind


class Keep(NamedTuple):
    """Keep a store for the ranks of this generation. With `port` 0, any port."""

    generation: int
    host: str
    port: int


class Signal(NamedTuple):
    signum: int
    ranks: tuple[int, ...] | None  # None: all of them


class Sweep(NamedTuple):
    """End all processes that the ranks of this generation have left behind.

    Processes in a session of their own have `patience_s` to end by themselves. `kept`: local ranks that continue; the
    sweep spares them and their processes.
    """

    generation: int
    patience_s: float = 0.0
    kept: tuple[int, ...] = ()


class Retire(NamedTuple):
    """End, without any rank: another zygote of this agent takes over, with the same scratch folder."""


class Ready(NamedTuple):
    is_warm: bool
    reason: str  # why the zygote is not warm
    import_s: float


class Started(NamedTuple):
    local_rank: int
    generation: int
    pid: int


class Exited(NamedTuple):
    local_rank: int
    generation: int
    pid: int
    exit_code: int | None  # None: a signal ended it
    signum: int
    at: float  # on the monotonic clock; the reports come in the order in which the ranks ended
    told: int = 0  # the last signal that the zygote sent it before it ended
    obstacle: str = ""  # why the rank did not start


class Keeping(NamedTuple):
    generation: int
    port: int
    is_kept: bool  # False: the port is only reserved for rank 0's own store
    error: str = ""


class KeeperEnded(NamedTuple):
    """The process that kept the store of this generation has ended, and nobody had ended it."""

    generation: int
    reason: str


class Swept(NamedTuple):
    generation: int
    killed: int


class Signalled(NamedTuple):
    """A process has sent a signal to the zygote. Under torchrun, the parent of the ranks is the launcher."""

    signum: int
    local_rank: int | None  # that sent it; None: a process that is gone, or not one of a rank


class Learned(NamedTuple):
    """The zygote has imported more modules, which its ranks import, too: the next ranks have them from the start."""

    modules: int


class Late(NamedTuple):
    """A script has set variables that torch reads when it is imported, and then imported torch."""

    variables: tuple[str, ...]
    file: str  # which seems to set them; "": not known


Order = Spawn | Keep | Signal | Sweep | Retire
Report = Ready | Started | Exited | Keeping | KeeperEnded | Swept | Signalled | Learned | Late
Message = Order | Report

CANNOT_START = 71  # the exit code of a rank that the system could not start, in agent and zygote
_KINDS: dict[str, Callable[..., Message]] = {
    kind.__name__: kind
    for kind in (
        Spawn,
        Keep,
        Signal,
        Sweep,
        Retire,
        Ready,
        Started,
        Exited,
        Keeping,
        KeeperEnded,
        Swept,
        Signalled,
        Learned,
        Late,
    )
}


def encode(message: Message) -> bytes:
    return json.dumps((type(message).__name__, *message)).encode()


def decode(data: bytes | bytearray) -> Message:
    kind, *fields = json.loads(data)
    return _KINDS[kind](*(tuple(field) if type(field) is list else field for field in fields))
