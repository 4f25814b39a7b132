"""Whether a rank has finished a training step, as its status page says: then it has imported what a step needs.

The zygote reads one field, without the agent's decoder: its modules import only the standard library. The page is
opened for each look, because the next rank would inherit a descriptor that stays open.
"""

from __future__ import annotations

import os

PAGE_VARIABLE = "DDP_STATUS_PAGE"
AT = 3736  # when the process finished its first step; 0 before
_BYTES = 8


def is_done(page: str) -> bool:
    """False as well if the rank has no page, or does not write it."""
    if not page:
        return False
    try:
        fd = os.open(page, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return any(os.pread(fd, _BYTES, AT))
    except OSError:
        return False
    finally:
        os.close(fd)
