"""The files of --duplicate-stdout-filters and --duplicate-stderr-filters: lines of all ranks that match."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from launcher.output import lines
from launcher.output.log_file import LogFile
from launcher.output.rank_stream import STREAM_NAMES
from launcher.settings.spec import Streams

if TYPE_CHECKING:
    from collections.abc import Callable

    from launcher.output.rank_display import RankDisplay
    from launcher.output.rank_stream import RankStream
    from launcher.settings.spec import LogSpec


class FilteredFiles:
    def __init__(
        self, log: LogSpec, directory: str, file_limit: int, complain: Callable[[str], None]
    ) -> None:
        self._directory, self._file_limit, self._complain = directory, file_limit, complain
        self._needles = {
            Streams.OUT: lines.any_of(log.stdout_filters),
            Streams.ERR: lines.any_of(log.stderr_filters),
        }
        self._files: dict[tuple[int, Streams], LogFile] = {}

    def add(self, stream: RankStream, display: RankDisplay, text: bytes) -> None:
        """Write those of these lines that match."""
        if needle := self._needles[stream.stream]:
            text = lines.without_color(text) if stream.has_terminal else text
            text = text if text.endswith(b"\n") else text + b"\n"  # a part of a line that is long, or redrawn
            self._file(stream).write(lines.prefixed(lines.matching(text, needle), display.prefix))

    def retire(self, before: int) -> None:
        """Close the files of the generations before this one."""
        for key in [key for key in self._files if key[0] < before]:
            self._files.pop(key).close()

    def _file(self, stream: RankStream) -> LogFile:
        key = (stream.label.generation, stream.stream)
        if key not in self._files:
            name = f"filtered_{STREAM_NAMES[stream.stream]}.log"
            path = os.path.join(self._directory, f"generation_{key[0]}", name)
            self._files[key] = LogFile(path, self._file_limit, self._complain)
        return self._files[key]
