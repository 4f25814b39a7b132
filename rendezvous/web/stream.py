"""Server-sent events that catch up: each has an id, and the last ones are kept. Pure.

A browser that has lost its connection sends the id of the last event that it has seen (Last-Event-ID). If all later
ones are still here, it gets these. Otherwise it gets a snapshot. An id is valid within one stream, whose random name it
contains: after a restart of the service there is another name, and so a snapshot.

Some kinds of events replace the one before (the state of a job, the table of ranks): only the last one of each is kept.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from typing import Any

_KEPT = 512


@dataclass(frozen=True, slots=True)
class Entry:
    number: int
    kind: str
    text: str  # JSON


def wire(entry: Entry, name: str) -> bytes:
    """JSON has no line breaks, so one line is enough for its text."""
    return f"id: {name}.{entry.number}\nevent: {entry.kind}\ndata: {entry.text}\n\n".encode()


STILL_HERE = b"event: still-here\ndata: 0\n\n"  # so that both sides notice a broken connection


class Backlog:
    """`replacing`: kinds of which only the last one counts."""

    def __init__(self, name: str, replacing: frozenset[str], kept: int = _KEPT) -> None:
        self.name = name
        self._replacing, self._kept = replacing, kept
        self._entries: deque[Entry] = deque()
        self._last: dict[str, Entry] = {}
        self._number = 0
        self._complete_after = 0  # entries with greater numbers are here

    def add(self, kind: str, what: Any) -> Entry:
        self._number += 1
        entry = Entry(self._number, kind, json.dumps(what, separators=(",", ":")))
        if kind in self._replacing:
            self._last[kind] = entry
        else:
            self._entries.append(entry)
            if len(self._entries) > self._kept:
                self._complete_after = self._entries.popleft().number
        return entry

    def since(self, last_id: str) -> list[Entry] | None:
        """What a client has missed; None if that is not known."""
        name, _, number = last_id.rpartition(".")
        if name != self.name or not (number.isascii() and number.isdigit()):
            return None
        after = int(number)
        if not self._complete_after <= after <= self._number:
            return None
        missed = [entry for entry in (*self._entries, *self._last.values()) if entry.number > after]
        return sorted(missed, key=lambda entry: entry.number)

    def snapshot(self, what: Any) -> Entry:
        """For one client: it continues after the last entry."""
        return Entry(self._number, "snapshot", json.dumps(what, separators=(",", ":")))
