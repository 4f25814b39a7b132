"""A broken invariant."""

from __future__ import annotations


class Violation(AssertionError):
    pass


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Violation(otherwise)
