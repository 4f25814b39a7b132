"""What a rank does before its script starts if one rank of the job is debugged (`ddp-launch --debug`).

The rank that is debugged has the keyboard to itself, and ends in the debugger if an exception ends its script; or it
waits for an editor. The other ranks read nothing from the keyboard, and `breakpoint()` does nothing in them.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # not from typing: the user may have a script called typing.py
if TYPE_CHECKING:
    from typing import Any

VARIABLE = "DDP_DEBUG"
_TERMINAL, _OTHER = "terminal", "other"


def keep_from_keyboard(env: dict[str, str]) -> None:
    """In any process that becomes a rank, also one that is no Python."""
    if env.get(VARIABLE) == _OTHER:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)


def enter() -> None:
    """In the Python process of a rank."""
    mode = os.environ.get(VARIABLE, "")
    if mode == _OTHER:
        os.environ["PYTHONBREAKPOINT"] = "0"
    elif mode == _TERMINAL:
        sys.excepthook = _examine
    elif mode:
        _wait_for_editor(mode)


def _examine(kind: Any, error: Any, trace: Any) -> None:
    sys.__excepthook__(kind, error, trace)
    if trace is not None and issubclass(kind, Exception) and sys.stdin is not None and sys.stdin.isatty():
        import pdb

        sys.stderr.write(
            "ddp-launch: the script has ended with this exception; pdb shows where, q ends the rank\n"
        )
        pdb.post_mortem(trace)


def _wait_for_editor(address: str) -> None:
    host, _, port = address.rpartition(":")
    rank = os.environ.get("RANK", "?")
    try:
        debugpy: Any = __import__("debugpy")
        debugpy.listen((host, int(port)))
    except Exception as error:  # not installed for this interpreter, or the port is in use
        sys.stderr.write(f"ddp-launch: rank {rank} cannot wait for a debugger at {address}: {error}\n")
        os._exit(1)
    sys.stderr.write(f"ddp-launch: rank {rank} waits for a debugger at {address} (pid {os.getpid()})\n")
    sys.stderr.flush()
    debugpy.wait_for_client()
