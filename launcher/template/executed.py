"""A rank that was executed rather than forked: what our hook does in it, on the interpreter's way to the script.

The hook's folder is on PYTHONPATH for the length of that way only. Before the script starts the environment and
sys.path are what they would have been, and a sitecustomize of the user's has been imported, if there is one.
"""

from __future__ import annotations

import os

from . import stacks, threshold, tracing

VARIABLE = "_DDP_LAUNCH_RANK"  # what PYTHONPATH was, after a mark that tells "nothing" from "not set"
_HOOK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "hook")


def announce() -> None:
    """In the process that is about to execute Python."""
    before = os.environ.get("PYTHONPATH")
    os.environ[VARIABLE] = "" if before is None else f"={before}"
    os.environ["PYTHONPATH"] = _HOOK if before is None else os.pathsep.join((_HOOK, before))


def enter(hook_folder: str) -> None:
    """In that Python."""
    before = os.environ.pop(VARIABLE)
    threshold.hide_hook(hook_folder, before[1:] if before else None)
    stacks.listen()
    tracing.when_torch_comes()
