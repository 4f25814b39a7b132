"""The status page: what lies where is what the docs say, and a reader never sees a mix of old and new."""

from __future__ import annotations

import random
import re
import struct
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp.telemetry import page_writer
from launcher.health import page
from launcher.health.page import (
    BLOCKS,
    ERROR,
    GROUPS,
    HEADER,
    MESSAGE,
    PROGRESS,
    RING,
    SECTION,
    TOTALS,
    Block,
)
from rendezvous.values.rank_view import ProcessView, RankPhase, RankView, Section

DOCS = Path(__file__).resolve().parents[2] / "docs" / "status-page.md"
SIZES = {"Q": 8, "I": 4, "i": 4}
NAMES = {"Q": "u64", "I": "u32", "i": "i32", "s": "text"}


def rows_of_the_docs() -> dict[int, tuple[int, str]]:
    table = DOCS.read_text().partition("<!-- layout:begin -->")[2].partition("<!-- layout:end -->")[0]
    rows = re.findall(r"^\| (\d+) \| (\d+) \| ([^|]*?) ?\|", table, re.M)
    return {int(at): (int(size), kind) for at, size, kind in rows}


def rows_of(block: Block, *, counter: bool = True) -> dict[int, tuple[int, str]]:
    rows = {block.at: (8, "u64")} if counter else {}
    at = block.at + (8 if counter else 0)
    for count, letter in re.findall(r"(\d*)([a-zA-Z])", block.fields.format.lstrip("=")):
        many = int(count or 1)
        if letter == "s":
            rows[at], at = (many, "text"), at + many
        elif many in (12, 24):
            rows[at], at = (96, f"{NAMES[letter]} x {many}"), at + 96
        else:
            for _ in range(many):
                rows[at], at = (SIZES[letter], NAMES[letter]), at + SIZES[letter]
    return rows


def test_the_docs_say_what_lies_where() -> None:
    expected = rows_of(HEADER, counter=False)
    for block in (PROGRESS, SECTION, MESSAGE, ERROR, RING[0], GROUPS[0], TOTALS):
        expected |= rows_of(block)
    assert TOTALS.end == page.SIZE
    assert rows_of_the_docs() == expected


def test_writer_and_reader_mean_the_same_places() -> None:
    ours = page_writer
    places = [ours.PROGRESS_AT, ours.SECTION_AT, ours.MESSAGE_AT, ours.ERROR_AT, ours.RING_AT, ours.GROUPS_AT]
    blocks = (PROGRESS, SECTION, MESSAGE, ERROR, RING[0], GROUPS[0], TOTALS)
    assert [*places, ours.TOTALS_AT] == [block.at for block in blocks]
    formats = [ours.PROGRESS, ours.NAMED, ours.MESSAGE, ours.ERROR, ours.COLLECTIVE, ours.GROUP, ours.TOTALS]
    assert [each.format for each in formats] == [block.fields.format for block in blocks]
    assert (len(RING), len(GROUPS)) == (ours.RING_SLOTS, ours.GROUP_SLOTS)
    assert all(a.end <= b.at for a, b in pairwise(BLOCKS))
    numbered = [getattr(ours, phase.upper()) for phase in RankPhase]
    assert numbered == list(range(len(RankPhase)))
    text = DOCS.read_text().replace("\n", " ")
    assert all(f"{number} {phase}" in text for number, phase in enumerate(RankPhase))


# --- torn writes -------------------------------------------------------------------------------------


class Interleaved:
    """A page whose writer gets on by some of its stores whenever the reader copies a piece."""

    def __init__(self, block: Block, turns: list[int]) -> None:
        self.memory = bytearray(page.header(0).ljust(page.SIZE, b"\0"))
        struct.pack_into("=I", self.memory, 20, 7)
        self._turns = iter(turns)
        self._stores = self._written(block)

    def _written(self, block: Block):  # type: ignore[no-untyped-def]
        """Forever: a block all of whose bytes tell its number, stored in pieces, the counter around it."""
        size = block.fields.size
        for number in range(1, 1_000_000):
            struct.pack_into("=Q", self.memory, block.at, 2 * number - 1)
            yield
            for start in range(0, size, 16):
                end = min(start + 16, size)
                self.memory[block.at + 8 + start : block.at + 8 + end] = bytes([number % 251]) * (end - start)
                yield
            struct.pack_into("=Q", self.memory, block.at, 2 * number)
            yield

    def look(self, at: int, size: int) -> bytes:
        copied = bytearray()
        for start in range(at, at + size, 8):
            for _ in range(next(self._turns, 0)):
                next(self._stores)
            copied += self.memory[start : min(start + 8, at + size)]
        return bytes(copied)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([PROGRESS, SECTION, MESSAGE, ERROR, RING[3], GROUPS[11], TOTALS]),
    st.lists(st.integers(0, 40)),
)
def test_a_block_is_old_or_new_and_never_a_mix(block: Block, turns: list[int]) -> None:
    shared = Interleaved(block, turns)
    seen, numbers = page.NOTHING, []
    for _ in range(4):
        seen = page.snapshot(shared.look, seen)
        body = seen.bodies[BLOCKS.index(block)]
        assert set(body) == {body[0]}, "bytes of two writes"
        numbers.append(body[0])
    assert numbers == sorted(numbers) or max(numbers) > 200  # forward only, but for the wrap of one byte


def test_what_a_dead_writer_left_half_written_is_not_believed() -> None:
    memory = bytearray(page.header(0).ljust(page.SIZE, b"\0"))
    struct.pack_into("=I", memory, 20, 7)
    memory[MESSAGE.at + 16 : MESSAGE.at + 21] = b"whole"
    struct.pack_into("=Q", memory, MESSAGE.at, 2)
    whole = page.snapshot(lambda at, size: bytes(memory[at : at + size]))
    memory[MESSAGE.at + 16 : MESSAGE.at + 21] = b"halfe"
    struct.pack_into("=Q", memory, MESSAGE.at, 3)
    after = page.snapshot(lambda at, size: bytes(memory[at : at + size]), whole)
    assert view_of(after).message == "whole"
    struct.pack_into("=I", memory, 20, 8)  # another process: what the one before said is not its word
    another = page.snapshot(lambda at, size: bytes(memory[at : at + size]), after)
    assert view_of(another).message == ""


def view_of(seen: page.Snapshot, now_ns: int = 10**12) -> RankView:
    return page.view(seen, now_ns, 3, ProcessView())


@given(st.integers(0, 10**9))
@settings(max_examples=50, deadline=None)
def test_a_page_full_of_nonsense_is_read_without_an_error(seed: int) -> None:
    memory = random.Random(seed).randbytes(page.SIZE)
    rank = view_of(page.snapshot(lambda at, size: memory[at : at + size]))
    assert page.in_words(rank) is not None
    numbers = [each for one in rank.collectives for each in (one.number, one.seq, one.numel)]
    assert all(0 <= number < 2**63 for number in [*numbers, rank.step])


def test_an_empty_page_says_that_nothing_is_known() -> None:
    memory = page.header(page.TRACE_COLLECTIVES).ljust(page.SIZE, b"\0")
    rank = view_of(page.snapshot(lambda at, size: memory[at : at + size]))
    assert rank == RankView(3)
    assert page.in_words(rank) == ""


@pytest.mark.parametrize(
    ("rank", "words"),
    [
        (RankView(0, known=True, phase=RankPhase.DATA), "in its data loader"),
        (RankView(0, known=True, phase=RankPhase.IDLE), ""),
        (
            RankView(0, known=True, phase=RankPhase.EVALUATION, section=Section("eval", 60.0, 1.0)),
            "in the section 'eval' of its script",
        ),
    ],
)
def test_where_a_rank_is_in_words(rank: RankView, words: str) -> None:
    assert page.in_words(rank) == words
