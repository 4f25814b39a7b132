"""What the hook does in an executed rank (not a forked one), before the interpreter starts the script.

The hook's folder is on PYTHONPATH only until then. When the script starts, the environment and sys.path are what they
would have been without it, and the user's sitecustomize has been imported, if there is one.
"""

from __future__ import annotations

import os

from . import debugging, stacks, terminal_size, threshold, tracing

VARIABLE = "_DDP_LAUNCH_RANK"  # the former PYTHONPATH after a "="; empty: it was not set
_HOOK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "hook")


def announce() -> None:
    """Prepare the environment in the process that is about to execute Python."""
    before = os.environ.get("PYTHONPATH")
    os.environ[VARIABLE] = "" if before is None else f"={before}"
    os.environ["PYTHONPATH"] = os.pathsep.join((_HOOK, before)) if before else _HOOK


def enter(hook_folder: str) -> None:
    """Restore the environment in that Python process."""
    before = os.environ.pop(VARIABLE)
    threshold.hide_hook(hook_folder, before[1:] if before else None)
    stacks.listen()
    terminal_size.follow_output()
    tracing.after_torch_import()
    debugging.enter()
