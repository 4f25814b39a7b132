"""The agent's side of the ssh control channel: its standard input, connected to the `ddp-launch --hosts` process.

The first line contains the environment, so that no secret appears in a command line. Each following line contains the
name of a signal. End of file means that the `--hosts` process has ended: the agent stops as on SIGTERM. The agent sends
its final message back in one framed line, so that the end of the job is shown once, not once for every host.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import MutableMapping
from typing import Any

from launcher.output import lines
from rendezvous.values.late_dataclass import dataclass

SSH_CONTROL = (
    "DDP_SSH_CONTROL"  # in the environment of an agent whose standard input is an ssh control channel
)
_FIRST_LINE = 1 << 20


@dataclass(frozen=True, slots=True)
class SshControl:
    address: str  # the address at which ssh reached this host; its peers can usually reach it there as well


def start_control(environ: MutableMapping[str, str]) -> SshControl | None:
    """Add the received variables to the environment and watch the channel. Return None if this agent has no channel."""
    if not environ.pop(SSH_CONTROL, ""):
        return None
    control = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # so that the ranks cannot read from the channel
    os.close(nothing)
    # The thread keeps the stream open. It blocks all signals, because the main thread handles them.
    stream = os.fdopen(control, "rb", buffering=0)
    first = json.loads(_line(stream) or b"{}")
    environ.update(first.get("env", {}))
    os.write(2, lines.framed("hello").encode() + b"\n")
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
