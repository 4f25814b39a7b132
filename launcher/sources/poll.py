"""Asks the health sources at intervals, in a thread of its own: a source that hangs delays nothing else."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from launcher.sources.findings import Opinion
from launcher.sources.source import SourceFailed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from launcher.sources.source import Source

EVERY_S = 30.0


class Poll:
    """`latest` is replaced as a whole, so that it can be read from another thread."""

    def __init__(
        self, sources: Sequence[Source], environ: Mapping[str, str], every_s: float = EVERY_S
    ) -> None:
        self._sources, self._environ, self._every_s = sources, environ, every_s
        self._over = threading.Event()
        self.latest: tuple[Opinion, ...] = ()

    def start(self) -> None:
        if self._sources:
            threading.Thread(target=self._run, name="health sources", daemon=True).start()

    def close(self) -> None:
        """End the thread without waiting: it may be blocked in a read."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.is_set():
            before = {opinion.place: opinion for opinion in self.latest}
            self.latest = tuple(self._asked(source, before.get(source.place)) for source in self._sources)
            self._over.wait(self._every_s)

    def _asked(self, source: Source, before: Opinion | None) -> Opinion:
        """If the source fails, its last findings stay: nothing says that they are over."""
        try:
            return Opinion(source.place, source.ask(self._environ), has_answered=True)
        except SourceFailed as error:
            known = before or Opinion(source.place)
            return replace(known, problem=str(error))
