"""Framed JSON objects in the output of an agent: messages to the `ddp-launch --hosts` process."""

from __future__ import annotations

import json
from typing import Any

FRAME = "\x1e"  # begins such a line


def framed(kind: str, **fields: str) -> str:
    return f"{FRAME}{json.dumps({'kind': kind, **fields})}"


def parse(line: bytes) -> dict[str, Any] | None:
    """Return the content of a framed line, or None."""
    if not line.startswith(FRAME.encode()):
        return None
    try:
        found = json.loads(line[1:])
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
