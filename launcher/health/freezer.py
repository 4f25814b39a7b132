"""Whether a cgroup freezer (`docker pause`) has frozen a process. The process state does not show it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from launcher.template.cgroup import folders

_SIGNS = (("cgroup.events", "frozen 1"), ("freezer.state", "FROZEN"))  # versions 2 and 1


def is_frozen(pid: int) -> bool:
    return any(map(_is_frozen, folders(pid, "freezer")))


def _is_frozen(folder: str) -> bool:
    """The root cgroup has neither cgroup.events nor freezer.state, because it cannot be frozen."""
    for name, sign in _SIGNS:
        with suppress(OSError, UnicodeDecodeError):
            if sign in Path(os.path.join(folder, name)).read_text().splitlines():
                return True
    return False
