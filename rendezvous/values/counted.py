"""A number with its noun, for texts that people read: "1 rank", "2 ranks"."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
