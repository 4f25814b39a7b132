"""Names or ranks as text, shortened if there are too many."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_NAMES = 20


def listed(names: Sequence[object], most: int = _MAX_NAMES) -> str:
    """Join names with commas. After `most` names, give only the number of the others."""
    shown = ", ".join(map(str, names[:most]))
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
