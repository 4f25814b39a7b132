"""A line of output that is for the `ddp-launch --hosts` at the other end, not for people: a framed JSON object."""

from __future__ import annotations

import json
from typing import Any

FRAME = "\x1e"  # begins such a line


def framed(kind: str, **fields: str) -> str:
    return f"{FRAME}{json.dumps({'kind': kind, **fields})}"


def heard(line: bytes) -> dict[str, Any] | None:
    """A framed line's content, at the other end."""
    if not line.startswith(FRAME.encode()):
        return None
    try:
        found = json.loads(line[1:])
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
