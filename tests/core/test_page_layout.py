"""The status page: what lies where is what the docs say, and a reader never sees a mix of old and new."""

from __future__ import annotations

import random
import runpy
import struct
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp.telemetry import contracts
from ddp.telemetry.contracts import HEADER_BLOCK, SIZE, TRACE_COLLECTIVES
from launcher.health import page
from launcher.health.page import (
    BLOCKS,
    ERROR,
    GROUPS,
    MESSAGE,
    PROGRESS,
    RING,
    SECTION,
    TOTALS,
    Block,
)
from rendezvous.values import rank_view
from rendezvous.values.rank_view import ProcessView, RankPhase, RankView, Section

ROOT = Path(__file__).resolve().parents[2]


def test_the_header_in_c_and_the_docs_are_made_from_the_contract() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "page_layout.py"))
    assert made["HEADER"].read_text() == made["header"](), "run `make layout`"
    assert made["DOCS"].read_text() == made["with_phases"](made["DOCS"].read_text()), "run `make layout`"


def test_blocks_follow_each_other_and_fill_the_page() -> None:
    assert all(a.end <= b.at for a, b in pairwise((HEADER_BLOCK, *BLOCKS)))
    assert TOTALS.end == contracts.SIZE
    assert len(contracts.PHASES) <= contracts.ROOM_FOR_PHASES


def test_both_sides_count_alike() -> None:
    """The values that agents and the service exchange have the names and sizes of the page."""
    assert tuple(RankPhase) == contracts.PHASES
    assert [getattr(contracts, name.upper()) for name in contracts.PHASES] == list(range(len(RankPhase)))
    assert rank_view.BINS == contracts.BINS


# --- torn writes -------------------------------------------------------------------------------------


class Interleaved:
    """A page whose writer gets on by some of its stores whenever the reader copies a piece."""

    def __init__(self, block: Block, turns: list[int]) -> None:
        self.memory = bytearray(page.header(0).ljust(SIZE, b"\0"))
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
    memory = bytearray(page.header(0).ljust(SIZE, b"\0"))
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


def view_of(seen: page.PageCopy, now_ns: int = 10**12) -> RankView:
    return page.view(seen, now_ns, 3, ProcessView())


@given(st.integers(0, 10**9))
@settings(max_examples=50, deadline=None)
def test_a_page_full_of_nonsense_is_read_without_an_error(seed: int) -> None:
    memory = random.Random(seed).randbytes(SIZE)
    rank = view_of(page.snapshot(lambda at, size: memory[at : at + size]))
    assert page.in_words(rank) is not None
    numbers = [each for one in rank.collectives for each in (one.number, one.seq, one.numel)]
    assert all(0 <= number < 2**63 for number in [*numbers, rank.step])


def test_an_empty_page_says_that_nothing_is_known() -> None:
    memory = page.header(TRACE_COLLECTIVES).ljust(SIZE, b"\0")
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
            'in the section "eval"',
        ),
    ],
)
def test_where_a_rank_is_in_words(rank: RankView, words: str) -> None:
    assert page.in_words(rank) == words
