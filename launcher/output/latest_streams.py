"""The streams of the latest generations by rank, and what ranks wrote last: for the pump and the control thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from launcher.settings.spec import Streams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from launcher.output.lines import RankLabel
    from launcher.output.rank_stream import RankStream

Move = tuple["RankLabel", "RankLabel"]  # of a rank that keeps its process: its label before, and its new one


class LatestStreams:
    """The lock guards the map, and the tail of every stream."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[tuple[int, int, Streams], RankStream] = {}
        # Called on the pump's thread with all output, if somebody watches it.
        self.on_output: Callable[[RankLabel, str, bytes], None] | None = None

    def add(self, stream: RankStream) -> None:
        with self._lock:
            self._streams[stream.label.generation, stream.label.rank, stream.stream] = stream

    def keep_tail(self, stream: RankStream, chunk: bytes) -> None:
        with self._lock:
            stream.keep_tail(chunk)
        if self.on_output is not None:
            self.on_output(stream.label, str(stream.stream), chunk)

    def last_words(self, rank: int, generation: int, which: Streams) -> bytes:
        with self._lock:
            found = self._streams.get((generation, rank, which))
            return found.last_words() if found else b""

    def of(self, rank: int, generation: int) -> list[RankStream]:
        with self._lock:
            found = (self._streams.get((generation, rank, which)) for which in (Streams.OUT, Streams.ERR))
            return [stream for stream in found if stream is not None]

    def forget_before(self, generation: int) -> None:
        with self._lock:
            for key in [key for key in self._streams if key[0] < generation]:
                del self._streams[key]

    def move(self, moves: Iterable[Move]) -> list[tuple[RankStream, RankLabel]]:
        """Find the streams of ranks that keep their processes under their new labels. Return them with these.

        Their tails begin anew: what such a rank wrote before says nothing about a failure that comes later.
        """
        with self._lock:
            moved = [
                (stream, after)
                for before, after in moves
                for which in (Streams.OUT, Streams.ERR)
                if (stream := self._streams.pop((before.generation, before.rank, which), None)) is not None
            ]
            for stream, after in moved:
                stream.forget_tail()
                self._streams[after.generation, after.rank, stream.stream] = stream
        return moved
