"""One output stream of one rank: its channel, its file, and its last bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.output.lines import CUT, TRACEBACK_HEADER, RankLabel, without_color
from launcher.settings.spec import Streams

if TYPE_CHECKING:
    from launcher.output.channels import Channel
    from launcher.output.log_file import LogFile, StreamKey
    from launcher.output.rank_display import RankDisplay
    from launcher.output.terminal import Terminal
    from launcher.settings.spec import LogSpec

STREAM_NAMES = {Streams.OUT: "stdout", Streams.ERR: "stderr"}
TAIL_LIMIT = 64 * 1024
_BEGINNING_LIMIT = 8 * 1024
_HEADER, _CUT = TRACEBACK_HEADER.encode(), f"\n{CUT}\n".encode()


def key_of(label: RankLabel, stream: Streams) -> StreamKey:
    return label.generation, label.rank, STREAM_NAMES[stream]


class RankStream:
    """One channel of one rank, and where its bytes go. It belongs to the pump, except its tail."""

    def __init__(
        self,
        label: RankLabel,
        stream: Streams,
        channel: Channel,
        file: LogFile,
        display: RankDisplay | None,
    ) -> None:
        self.label = label
        self.stream = stream
        self.fd = channel.source
        self.has_terminal = channel.is_terminal
        self.file = file
        self.display = display  # None: the stream goes to its file only
        self.tail = bytearray()
        self.beginning = b""  # of the last traceback that started before the tail

    def relabel(self, log: LogSpec, label: RankLabel) -> None:
        self.label = label
        if self.display is not None:
            self.display.relabel(log, label)

    @property
    def terminal(self) -> Terminal | None:
        return self.display.terminal if self.display else None

    def keep_tail(self, chunk: bytes) -> None:
        self.tail += chunk[-TAIL_LIMIT:]
        if len(self.tail) > 2 * TAIL_LIMIT:
            self.beginning = self._last_beginning()
            del self.tail[:-TAIL_LIMIT]

    def forget_tail(self) -> None:
        self.tail.clear()
        self.beginning = b""

    def last_words(self) -> bytes:
        """Return the tail, preceded by the beginning of a traceback that it may belong to, the most useful part.

        A carriage return in the tail excludes the beginning: a progress bar ran since, so the rank survived.
        """
        tail = without_color(bytes(self.tail[-TAIL_LIMIT:]))
        beginning = self._last_beginning()
        if not beginning or _HEADER in tail or b"\r" in tail:
            return tail
        return beginning + _CUT + tail.partition(b"\n")[2]

    def _last_beginning(self) -> bytes:
        before_tail = max(0, len(self.tail) - TAIL_LIMIT)
        if self.stream is not Streams.ERR or not before_tail:
            return self.beginning
        at = self.tail.rfind(_HEADER, 0, before_tail + len(_HEADER) - 1)
        return self.beginning if at < 0 else bytes(self.tail[at : at + _BEGINNING_LIMIT])
