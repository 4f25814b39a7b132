"""Reads the lines of a journal, as far as it is whole: a job that still runs, or was killed, has no end in its file."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

from rendezvous.replay.records import FAMILY, MAGIC, Header, RecordUnreadable, read_header
from rendezvous.values.error_codes import Code, Coded

if TYPE_CHECKING:
    from collections.abc import Iterator

_CHUNK = 4096
_UNPACKED = 1 << 20  # bytes at a time; a hostile file must not take all memory
_LONGEST = 256 << 20  # line


class JournalUnreadable(Coded, ValueError):
    """This file is not a journal, or one of another release. The message is for a user."""

    code = Code.JOURNAL_UNREADABLE


class JournalFile:
    """`damage`: why the rest of the file is not readable, known when `lines` has ended; "" if there is none."""

    def __init__(self, path: str) -> None:
        self.path, self.damage = path, ""
        self.is_complete = False
        with open(path, "rb") as file:
            self._check_magic(file.read(len(MAGIC) + 16))
        try:
            self.header: Header = read_header(next(self._all_lines()))
        except StopIteration:
            raise JournalUnreadable(f"{path} has no header: {self.damage or 'it is empty'}") from None
        except RecordUnreadable as error:
            raise JournalUnreadable(f"{path} is damaged: {error}") from None

    def _check_magic(self, begin: bytes) -> None:
        if begin.startswith(MAGIC):
            return
        if begin.startswith(FAMILY):
            number = begin[len(FAMILY) :].split(b"\n")[0][:8].decode("ascii", "replace")
            own = MAGIC[len(FAMILY) :].strip().decode()
            raise JournalUnreadable(
                f"{self.path} has format {number}, and this release reads format {own}. Use the release that wrote it, "
                "or a later one"
            )
        raise JournalUnreadable(
            f"{self.path} is not a journal: it begins with {begin[:12]!r}. Journals have names that end in .ddpj"
        )

    def lines(self) -> Iterator[bytes]:
        """Of the records, without the header."""
        lines = self._all_lines()
        next(lines)
        return lines

    def _all_lines(self) -> Iterator[bytes]:
        self.damage, rest = "", b""
        try:
            for part in self._unpacked():
                *whole, rest = (rest + part).split(b"\n")
                yield from whole
                if len(rest) > _LONGEST:
                    self.damage = f"a line is longer than {_LONGEST >> 20} MiB"
                    return
        except zlib.error as error:
            self.damage = f"its compressed data is damaged ({error})"

    def _unpacked(self) -> Iterator[bytes]:
        unpacker = zlib.decompressobj()
        with open(self.path, "rb") as file:
            file.seek(len(MAGIC))
            while not unpacker.eof and (packed := file.read(_CHUNK)):
                before = unpacker.copy()
                try:
                    parts = list(_parts(unpacker, packed))
                except zlib.error:  # what comes before the damage in this chunk is lost with it
                    for at in range(len(packed)):
                        yield from _parts(before, packed[at : at + 1])
                    raise
                yield from parts
            self.is_complete = unpacker.eof


def _parts(unpacker: Any, packed: bytes) -> Iterator[bytes]:
    while packed:
        part = unpacker.decompress(packed, _UNPACKED)
        packed = unpacker.unconsumed_tail
        if part:
            yield part
