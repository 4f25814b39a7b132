"""The agent's end of a tether: its standard input, held by the `ddp-launch --hosts` that started it.

The first line brings the environment (so that no secret stands in a command line), each further one the name of a
signal. The end of the stream means that nobody is there any more: the agent stops as on SIGTERM. What the agent has
to say at the end goes back in one framed line, so that the job's story is told once and not once for every host.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from launcher.hosts.command_lines import TETHER
from launcher.output import frames

if TYPE_CHECKING:
    from collections.abc import MutableMapping

_FIRST_LINE = 1 << 20


@dataclass(frozen=True, slots=True)
class Tether:
    address: str  # where ssh reached this host: as a rule its peers can as well


def take_up(environ: MutableMapping[str, str]) -> Tether | None:
    """None: this agent has none. Else the environment is complete, and the tether is watched."""
    if not environ.pop(TETHER, ""):
        return None
    tether = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # the ranks read nothing of it
    os.close(nothing)
    # Kept open by the thread. It blocks all signals: they are the main thread's to answer.
    stream = os.fdopen(tether, "rb", buffering=0)
    first = json.loads(_line(stream) or b"{}")
    environ.update(first.get("env", {}))
    os.write(2, frames.framed("hello").encode() + b"\n")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    threading.Thread(target=_watch, args=(stream,), name="tether", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    ssh = environ.get("SSH_CONNECTION", "").split()
    return Tether(first.get("address") or (ssh[2] if len(ssh) == 4 else ""))


def _line(stream: Any) -> bytes:
    """Byte by byte: the stream is unbuffered, and what follows the line is not ours to take."""
    line = bytearray()
    while len(line) < _FIRST_LINE:
        byte: bytes = stream.read(1)
        if not byte or byte == b"\n":
            break
        line += byte
    return bytes(line)


def _watch(stream: Any) -> None:
    while line := _line(stream):
        name = line.decode(errors="replace").strip()
        if name in signal.Signals.__members__:
            os.kill(os.getpid(), signal.Signals[name])
    os.kill(os.getpid(), signal.SIGTERM)
