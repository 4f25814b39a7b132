"""The agent's end of the ssh control channel: its standard input, held by the `ddp-launch --hosts` that started it.

The first line brings the environment (so that no secret stands in a command line), each further one the name of a
signal. The end of the stream means that the command has ended: the agent stops as on SIGTERM. The agent sends its
final message back in one framed line, so that the end of the job is shown once, not once for every host.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from launcher.hosts.command_lines import SSH_CONTROL
from launcher.output import frames

if TYPE_CHECKING:
    from collections.abc import MutableMapping

_FIRST_LINE = 1 << 20


@dataclass(frozen=True, slots=True)
class SshControl:
    address: str  # where ssh reached this host: as a rule its peers can as well


def take_up(environ: MutableMapping[str, str]) -> SshControl | None:
    """Complete the environment and watch the channel. None: this agent has no channel."""
    if not environ.pop(SSH_CONTROL, ""):
        return None
    control = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # the ranks read nothing of it
    os.close(nothing)
    # Kept open by the thread. It blocks all signals: they are the main thread's to answer.
    stream = os.fdopen(control, "rb", buffering=0)
    first = json.loads(_line(stream) or b"{}")
    environ.update(first.get("env", {}))
    os.write(2, frames.framed("hello").encode() + b"\n")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    threading.Thread(target=_watch, args=(stream,), name="ssh-control", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    ssh = environ.get("SSH_CONNECTION", "").split()
    return SshControl(first.get("address") or (ssh[2] if len(ssh) == 4 else ""))


def _line(stream: Any) -> bytes:
    """Read byte by byte: the stream is unbuffered, and the data after the line is for another reader."""
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
