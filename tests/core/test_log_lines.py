"""Output of ranks as lines: in the order of time, and nothing in them controls the terminal."""

from __future__ import annotations

import pytest

from rendezvous.control.log_lines import lines_of, on_terminal
from rendezvous.values.questions import LogPiece, LogStream


def piece(rank: int, at: float, data: bytes, lost: int = 0) -> LogPiece:
    return LogPiece(1, rank, LogStream.STDOUT, at, data, lost)


def test_lines_of_several_ranks_are_in_the_order_of_time() -> None:
    pieces = [
        ("a", piece(0, 1.0, b"one\n")),
        ("a", piece(0, 3.0, b"four\nfive")),
        ("b", piece(1, 2.0, b"two\n\nthree\n")),
    ]
    assert [(line.rank, line.text) for line in lines_of(pieces)] == [
        (0, "one"),
        (1, "two"),
        (1, ""),
        (1, "three"),
        (0, "four"),
        (0, "five"),
    ]


def test_bytes_that_are_gone_are_reported_before_the_line() -> None:
    (gone, line) = lines_of([("a", piece(0, 1.0, b"\xff\n", 12))])
    assert gone.text.startswith("[12 bytes are gone")
    assert line.text == "\ufffd"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("10%\r20%\r30%\r", "30%"),
        ("\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m\x1b[0m"),
        ("\x1b]0;title\x07x\x1b[2J\x1b[10;10Hy\x1bc\x08", "xy"),
        ("\x9b31mC1\x85", "31mC1"),
        ("a\tb", "a\tb"),
    ],
)
def test_only_colours_and_tabs_reach_a_terminal(text: str, shown: str) -> None:
    assert on_terminal(text, color=True) == shown


def test_without_colours_there_is_no_escape_sequence_at_all() -> None:
    assert on_terminal("\x1b[31mred\x1b[0m", color=False) == "red"
