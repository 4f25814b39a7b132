"""Reads files and directories in /proc and /sys. Returns an empty value if one does not exist."""

from __future__ import annotations

import os


def names_in(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def text_of(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 16)
    except OSError:
        return ""
