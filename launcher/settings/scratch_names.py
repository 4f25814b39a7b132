"""Names of files in the node's scratch folder that several modules use."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def timer_file(scratch: str, environ: Mapping[str, str]) -> str:
    """A named pipe; see launcher/health/rank_timers.py."""
    return environ.get("TORCHELASTIC_TIMER_FILE") or f"{scratch}/timers"
