"""What is read of log files: the last lines, from a time, from a place on, and what the size limit has removed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from launcher.answers.log_reading import read_logs
from launcher.output.log_file import LogFile, LogFiles
from rendezvous.values.questions import LogPieces, LogPlace, LogStream, LogsWanted

if TYPE_CHECKING:
    from pathlib import Path


class Clock:
    """The wall clock of the histories."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("launcher.output.log_file.time.time", lambda: self.now)


class Node:
    def __init__(self, folder: Path, clock: Clock, limit: int = 0) -> None:
        self.complaints: list[str] = []
        self.files, self._folder, self._clock = LogFiles(limit, self.complaints.append), folder, clock

    def open(self, rank: int, generation: int = 1, stream: str = "stdout") -> LogFile:
        path = self._folder / f"generation_{generation}" / f"rank_{rank}" / f"{stream}.log"
        return self.files.open(str(path), (generation, rank, stream))

    def read(self, **wanted: object) -> LogPieces:
        return read_logs(LogsWanted(**wanted), self.files.known(), self._clock.now)  # type: ignore[arg-type]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def node(tmp_path: Path, clock: Clock) -> Node:
    return Node(tmp_path, clock)


def text(found: LogPieces) -> str:
    return b"".join(piece.data for piece in found.pieces).decode()


def test_the_last_lines_of_each_stream(node: Node) -> None:
    for rank in (0, 1):
        node.open(rank).write(b"".join(b"%d of %d\n" % (line, rank) for line in range(5000)))
    assert text(node.read(tail=2)) == "4998 of 0\n4999 of 0\n4998 of 1\n4999 of 1\n"
    assert text(node.read(tail=1, ranks=(1,))) == "4999 of 1\n"
    assert text(node.read(tail=9999, ranks=(1,))).startswith("0 of 1\n") is True


def test_ranks_that_write_in_turn_are_read_in_that_order(node: Node, clock: Clock) -> None:
    files = [node.open(0), node.open(1)]
    for number in range(6):
        clock.now += 1
        files[number % 2].write(b"%d\n" % number)
    found = node.read()
    assert text(found) == "0\n1\n2\n3\n4\n5\n"
    assert [piece.at for piece in found.pieces] == [1001.0, 1002.0, 1003.0, 1004.0, 1005.0, 1006.0]


def test_since_a_time_means_what_was_written_later_in_all_generations(node: Node, clock: Clock) -> None:
    for generation in (1, 2):
        file = node.open(0, generation)
        for number in range(4):
            clock.now += 10
            file.write(b"%d.%d\n" % (generation, number))
    assert text(node.read(since_s=25.0)) == "2.1\n2.2\n2.3\n"
    assert text(node.read(since_s=55.0)) == "1.2\n1.3\n2.0\n2.1\n2.2\n2.3\n"
    assert text(node.read(since_s=1e9, generation=1)) == "1.0\n1.1\n1.2\n1.3\n"
    assert text(node.read(tail=9)) == "2.0\n2.1\n2.2\n2.3\n"


def test_bounded_answers_that_continue_give_every_byte_once(node: Node, clock: Clock) -> None:
    files = {rank: node.open(rank) for rank in range(3)}
    wrote = dict.fromkeys(files, b"")
    found, got = node.read(), dict.fromkeys(files, b"")
    for round_ in range(40):
        clock.now += 0.1 * round_
        for rank, file in files.items():
            chunk = b"%d " % round_ * (7 * rank + 1) + (b"\n" if round_ % 3 else b"")
            file.write(chunk)
            wrote[rank] += chunk
        found = node.read(places=found.places, most_bytes=100)
        assert sum(len(piece.data) for piece in found.pieces) <= 100
        for piece in found.pieces:
            got[piece.rank] += piece.data
    for file in files.values():
        file.close()
    while found.pieces or found.more:
        found = node.read(places=found.places, most_bytes=100)
        for piece in found.pieces:
            got[piece.rank] += piece.data
    assert got == wrote


def test_a_line_is_shown_when_it_is_complete_or_the_rank_has_ended(node: Node) -> None:
    file = node.open(0)
    file.write(b"whole\nhalf")
    first = node.read()
    assert text(first) == "whole\n"
    assert text(node.read(places=first.places)) == ""
    file.close()
    assert text(node.read(places=first.places)) == "half"


def test_what_the_size_limit_has_removed_is_counted(tmp_path: Path, clock: Clock) -> None:
    node = Node(tmp_path, clock, limit=100)
    file = node.open(0)
    file.write(b"x" * 9 + b"\n")
    first = node.read()
    for _ in range(24):
        file.write(b"y" * 9 + b"\n")
    found = node.read(places=first.places)
    assert found.pieces[0].lost == 90
    assert text(found) == ("y" * 9 + "\n") * 15
    assert node.read(places=found.places).pieces == ()


def test_a_new_generation_is_read_after_the_places_of_the_last_one(node: Node) -> None:
    node.open(0, 1).write(b"first\n")
    places = node.read().places
    node.open(0, 2).write(b"second\n")
    assert text(node.read(places=places)) == "second\n"


def test_the_output_of_a_rank_that_keeps_its_process_belongs_to_two_generations(node: Node) -> None:
    file = node.open(3, 1)
    file.write(b"before\nhalf")
    places = node.read().places
    node.files.move((1, 3, "stdout"), (2, 2, "stdout"))
    file.write(b" line\nafter\n")
    assert [(piece.generation, piece.rank, piece.data) for piece in node.read(places=places).pieces] == [
        (1, 3, b"half"),
        (2, 2, b" line\nafter\n"),
    ]
    assert text(node.read(tail=1)) == "after\n"
    assert text(node.read(tail=9, generation=1)) == "before\nhalf"


def test_a_file_that_was_deleted_is_no_error(node: Node, tmp_path: Path) -> None:
    node.open(0).write(b"gone\n")
    (tmp_path / "generation_1" / "rank_0" / "stdout.log").unlink()
    found = node.read()
    assert (found.pieces, found.places) == ((), (LogPlace(1, 0, LogStream.STDOUT, 5),))
