"""Reads a bounded part of the ranks' log files: the lines of all streams in the order in which they were written.

Every answer names the place up to which it has read each stream, so that the next question continues there, and an
interrupted `ddpctl logs -f` too. Places count all bytes of a stream since its start. If the size limit has removed
bytes after a place, the next piece says how many.

A stream is read in segments between the marks of its history (`launcher.output.log_file`), oldest first over all
streams. A segment ends at the last complete line; the rest belongs to the next one, unless the line is very long.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rendezvous.values.questions import MOST_LOG_BYTES, LogPiece, LogPieces, LogPlace, LogStream, LogsWanted

if TYPE_CHECKING:
    from launcher.output.log_file import Kept, RankLog, StreamKey

_LONG_LINE = 64 * 1024
_TAIL_BYTES = 256 * 1024  # of one stream, in which its last lines are looked for
_SEGMENT = 128 * 1024
_TRIES = 3


@dataclass(slots=True)
class _Stream:
    key: StreamKey
    path: str
    kept: Kept
    at: int  # offset of the next byte
    lost: int = 0
    segment: int = 0  # index of the mark that the next byte belongs to

    def time(self) -> float:
        return self.kept.marks[self.segment][0] if self.kept.marks else 0.0


def read_logs(wanted: LogsWanted, known: Mapping[StreamKey, RankLog], now: float) -> LogPieces:
    """Blocks on files: call it in a thread."""
    budget = min(wanted.most_bytes, MOST_LOG_BYTES) if wanted.most_bytes > 0 else MOST_LOG_BYTES
    keys = _streams_for(wanted, known)
    places = {(p.generation, p.rank, str(p.stream)): p.offset for p in wanted.places}
    share = budget // (len(keys) or 1)
    for _ in range(_TRIES):
        streams = [_opened(key, known[key], wanted, places, now, share) for key in keys]
        pieces, more = _read(streams, budget)
        if all(known[each.key].history.kept().start == each.kept.start for each in streams):
            break  # else a file was rotated meanwhile, and its offsets are others
    ends = tuple(LogPlace(*each.key[:2], LogStream(each.key[2]), each.at) for each in streams)
    return LogPieces(tuple(pieces), ends, more)


def _streams_for(wanted: LogsWanted, known: Mapping[StreamKey, object]) -> list[StreamKey]:
    keys = sorted(key for key in known if not wanted.ranks or key[1] in wanted.ranks)
    if wanted.generation:
        return [key for key in keys if key[0] == wanted.generation]
    if wanted.places:
        first = min(place.generation for place in wanted.places)
    elif wanted.since_s is not None or not keys:
        first = 0
    else:
        first = keys[-1][0]
    return [key for key in keys if key[0] >= first]


def _opened(
    key: StreamKey, log: RankLog, wanted: LogsWanted, places: Mapping[StreamKey, int], now: float, share: int
) -> _Stream:
    kept = log.history.kept()
    if log.last is not None:  # the rest of the file belongs to a later generation
        kept = replace(kept, size=min(kept.size, log.last), is_closed=True)
    oldest = max(kept.before, log.first)
    if key in places:
        at = max(log.first, min(places[key], kept.size))
    elif wanted.since_s is not None:
        at = next((offset for time, offset in kept.marks if time >= now - wanted.since_s), kept.size)
    elif wanted.places or wanted.tail <= 0:
        at = log.first
    else:
        window = max(_LONG_LINE, min(share, _TAIL_BYTES))
        at = _tail_offset(log.path, kept, wanted.tail, oldest, window)
    stream = _Stream(
        key, log.path, kept, min(max(at, oldest), kept.size), max(0, kept.before - max(at, log.first))
    )
    marks = kept.marks
    while stream.segment + 1 < len(marks) and marks[stream.segment + 1][1] <= stream.at:
        stream.segment += 1
    return stream


def _tail_offset(path: str, kept: Kept, lines: int, oldest: int, window: int) -> int:
    """The offset of the last lines, at most `window` bytes before the end."""
    begin = max(oldest, kept.size - window)
    data = _bytes(path, kept, begin, kept.size)
    at = len(data) - 1 if data.endswith(b"\n") else len(data)
    for _ in range(lines):
        at = data.rfind(b"\n", 0, max(0, at))
        if at < 0:
            return begin if begin == oldest else begin + data.find(b"\n") + 1
    return begin + at + 1


def _read(streams: Sequence[_Stream], budget: int) -> tuple[list[LogPiece], bool]:
    pieces: list[LogPiece] = []
    waiting = [(each.time(), number) for number, each in enumerate(streams) if each.at < each.kept.size]
    heapq.heapify(waiting)
    while waiting:
        if budget <= 0:
            return pieces, True
        _, number = heapq.heappop(waiting)
        stream = streams[number]
        piece, goes_on = _next_piece(stream, budget)
        if piece is not None:
            pieces.append(piece)
            budget -= len(piece.data)
        if goes_on:
            heapq.heappush(waiting, (stream.time(), number))
    return pieces, False


def _next_piece(stream: _Stream, budget: int) -> tuple[LogPiece | None, bool]:
    """The lines that end in the next segment, and whether the stream has more."""
    kept, time = stream.kept, stream.time()
    is_last = stream.segment + 1 >= len(kept.marks)
    segment_end = kept.size if is_last else kept.marks[stream.segment + 1][1]
    end = min(segment_end, stream.at + _SEGMENT)
    data = _bytes(stream.path, kept, stream.at, end)
    if len(data) < end - stream.at:  # another program has changed the file
        piece = _piece(stream, time, data)
        stream.at = kept.size
        return piece, False
    at_end = end >= kept.size
    cut = data.rfind(b"\n") + 1
    if (at_end and kept.is_closed) or (not cut and len(data) >= _LONG_LINE):
        cut = len(data)
    if cut > budget:
        cut = (data.rfind(b"\n", 0, budget) + 1) or budget
        return _piece(stream, time, data[:cut]), True
    if end >= segment_end and not is_last:
        stream.segment += 1
    return _piece(stream, time, data[:cut]), not at_end


def _piece(stream: _Stream, time: float, data: bytes) -> LogPiece | None:
    if not data:
        return None
    generation, rank, name = stream.key
    lost, stream.lost = stream.lost, 0
    stream.at += len(data)
    return LogPiece(generation, rank, LogStream(name), time, data, lost)


def _bytes(path: str, kept: Kept, begin: int, end: int) -> bytes:
    """Bytes by their offsets. Fewer, if the files have changed since."""
    older = _part(f"{path}.1", begin - kept.before, min(end, kept.start) - begin)
    newer_from = max(begin, kept.start)
    return older + _part(path, newer_from - kept.start, end - newer_from)


def _part(path: str, offset: int, count: int) -> bytes:
    if count <= 0:
        return b""
    try:
        with open(path, "rb") as file:
            return os.pread(file.fileno(), count, offset)
    except OSError:
        return b""
