"""Errors of this library end with a code, such as [DDP-7002]; `ddpctl explain DDP-7002` explains it.

The table of all codes is `rendezvous/values/error_codes.py`. This package imports nothing of that one, so the codes are
text here, and a test compares them with the table.
"""

from __future__ import annotations

from collections.abc import Sequence


class CodedError(Exception):
    code = ""

    def __str__(self) -> str:
        return f"{super().__str__()} [{self.code}]"


class WrongValue(CodedError, ValueError):
    """An argument has a wrong value."""

    code = "DDP-7006"


class WrongType(CodedError, TypeError):
    """An argument has a wrong type."""

    code = "DDP-7006"


class WrongUse(CodedError, RuntimeError):
    """A call that is not possible now, or in this way."""

    code = "DDP-7007"


def listed(names: Sequence[object], most: int = 20) -> str:
    """Join names or ranks with commas. After `most` names, give only the number of the others."""
    shown = ", ".join(map(str, names[:most]))
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
