"""Which releases of torch we work with. Older ones have no store that takes over an open socket, among other things."""

from __future__ import annotations

import re

LEAST = (2, 8)


def too_old(release: str) -> str:
    """What is wrong with this release of torch; "" if it is new enough, or cannot be read."""
    found = re.match(r"(\d+)\.(\d+)", release)
    if found is None or (int(found[1]), int(found[2])) >= LEAST:
        return ""
    return f"needs torch {LEAST[0]}.{LEAST[1]} or newer, found {release}: upgrade torch"
