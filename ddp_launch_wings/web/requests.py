"""The bodies of requests of the page: JSON that is checked field by field. Pure."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from typing import Any

from rendezvous.values.questions import LogStream

ACTIONS = ("drain", "resume", "restart", "checkpoint", "abort")
_NODE_ACTIONS = ("drain", "resume")
_STREAMS = tuple(map(str, LogStream))
_MOST_RANKS, _MOST_PLACES, _MOST_TAIL, _MOST_WAIT_S = 1000, 20_000, 5000, 20.0
_TEXT_CHARS = 400
_GREATEST = 2**53


class BadRequest(ValueError):
    """The request is invalid. The message is for its author."""


@dataclass(frozen=True, slots=True)
class LogsRequest:
    job: str
    ranks: tuple[int, ...]
    tail: int
    places: tuple[tuple[int, int, str, int], ...]
    wait_s: float
    search: str = ""  # only lines with this text, of all generations


@dataclass(frozen=True, slots=True)
class OrderRequest:
    job: str
    action: str
    node: str
    reason: str


_SEARCH_CHARS = 200


def fields(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadRequest("the body is not a JSON object")
    return found


def text(found: dict[str, Any], name: str, most: int = _TEXT_CHARS) -> str:
    value = found.get(name, "")
    if not isinstance(value, str) or len(value) > most:
        raise BadRequest(f"invalid {name!r}: use a text of at most {most} characters")
    return value


def whole(value: Any, name: str, least: int = 0, most: int = _GREATEST) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise BadRequest(f"invalid {name!r}: use a whole number from {least} to {most}")
    return value


def logs_request(body: bytes) -> LogsRequest:
    found = fields(body)
    ranks, places = found.get("ranks", []), found.get("places", [])
    wait_s = found.get("wait_s", 0)
    if not isinstance(ranks, list) or len(ranks) > _MOST_RANKS:
        raise BadRequest(f"invalid 'ranks': use a list of at most {_MOST_RANKS} numbers")
    if not isinstance(places, list) or len(places) > _MOST_PLACES:
        raise BadRequest("invalid 'places': use those of the last answer")
    if not isinstance(wait_s, int | float) or not 0 <= wait_s <= _MOST_WAIT_S:
        raise BadRequest(f"invalid 'wait_s': use 0 to {_MOST_WAIT_S:g}")
    return LogsRequest(
        _job(found),
        tuple(whole(rank, "ranks", most=10**6) for rank in ranks),
        whole(found.get("tail", 0), "tail", most=_MOST_TAIL),
        tuple(_place(place) for place in places),
        float(wait_s),
        text(found, "search", _SEARCH_CHARS),
    )


def _place(place: Any) -> tuple[int, int, str, int]:
    if not isinstance(place, list) or len(place) != 4 or place[2] not in _STREAMS:
        raise BadRequest("invalid 'places': use those of the last answer")
    generation, rank, stream, at = place
    return whole(generation, "places"), whole(rank, "places"), stream, whole(at, "places")


def order_request(body: bytes) -> OrderRequest:
    found = fields(body)
    action, node = text(found, "action"), text(found, "node", 256)
    if action not in ACTIONS:
        raise BadRequest(f"invalid 'action' {action!r}: use one of {', '.join(ACTIONS)}")
    if bool(node) != (action in _NODE_ACTIONS):
        raise BadRequest(
            f"{action}: {'name a node' if action in _NODE_ACTIONS else 'this is not about a node'}"
        )
    return OrderRequest(_job(found), action, node, text(found, "reason").strip())


def _job(found: dict[str, Any]) -> str:
    job = text(found, "job")
    if not job:
        raise BadRequest("'job' is missing")
    return job


# --- server-sent events that catch up: each has an id, and the last ones are kept. Pure -------------
#
# A browser that has lost its connection sends the id of the last event that it has seen (Last-Event-ID). If all later
# ones are still here, it gets these. Otherwise it gets a snapshot. An id is valid within one stream, whose random
# name it contains: after a restart of the service there is another name, and so a snapshot.
#
# Some kinds of events replace the one before (the state of a job, the table of ranks): only the last one of each is
# kept.

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
