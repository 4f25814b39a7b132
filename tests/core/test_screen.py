"""What a rank writes to its terminal: finished lines, live rows, and which of them become lines in a pipe."""

from __future__ import annotations

import time
import unicodedata
from itertools import pairwise
from typing import TYPE_CHECKING

import pyte
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.output import lines, live_area, screen
from launcher.output.lines import LINE_LIMIT
from launcher.output.live_area import StreamView
from launcher.output.screen import (
    FORGET_S,
    PROMPT_AFTER_S,
    ROWS_LIMIT,
    SETTLE_S,
    RedrawnRows,
    Screen,
    ScreenRow,
    cells_of,
    rendered,
    restyled,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

RECORDED = StreamView()
NEVER_DONE = RedrawnRows(reach=ROWS_LIMIT)
ON_A_TERMINAL = StreamView(is_recorded=False)


class Rank:
    """One stream, its clock, and all that came of it."""

    def __init__(self, view: StreamView) -> None:
        self.view, self.now = view, 0.0
        self.lines = self.record = b""

    def write(self, *chunks: bytes, after_s: float = 0.0) -> Rank:
        for chunk in chunks:
            self.wait(after_s)
            self.view, texts = live_area.feed(self.view, chunk, self.now)
            self._add(texts)
        return self

    def wait(self, seconds: float) -> Rank:
        """With every look that is due on the way."""
        until = self.now + seconds
        while (due := live_area.due_at(self.view)) is not None and due <= until:
            self.now = max(self.now, due)
            self.view, texts = live_area.update(self.view, self.now)
            self._add(texts)
        self.now = until
        return self

    def end(self) -> Rank:
        self._add(live_area.finish(self.view))
        return self

    def _add(self, texts: live_area.Texts) -> None:
        self.lines, self.record = self.lines + texts.lines, self.record + texts.record

    @property
    def live(self) -> list[str]:
        return [lines.without_color(row.line()).decode() for row in live_area.live_rows(self.view)]

    @property
    def prompt(self) -> str | None:
        row = live_area.prompt(self.view)
        return None if row is None else rendered(row.cells)


def shown(*chunks: bytes, view: StreamView = RECORDED) -> bytes:
    """What a pipe shows of a stream that ends after these chunks, all at one instant."""
    return Rank(view).write(*chunks).end().record


# --- plain text ----------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=40).map(lambda b: b.translate(None, b"\r\x08\x1b")), max_size=20))
def test_plain_text_is_unchanged_whatever_the_chunks(chunks: list[bytes]) -> None:
    text = b"".join(chunks)
    whole = text if not text or text.endswith(b"\n") else text + b"\n"
    assert shown(*chunks) == Rank(ON_A_TERMINAL).write(*chunks).end().lines == whole


@given(st.lists(st.text("ab\r\n\b", max_size=12), max_size=8), st.floats(0, 10))
def test_every_output_is_whole_lines_without_carriage_returns(chunks: list[str], after_s: float) -> None:
    rank = Rank(RECORDED)
    for chunk in chunks:
        rank.write(chunk.encode(), after_s=after_s)
        for text in (rank.lines, rank.record):
            assert b"\r" not in text
            assert not text or text.endswith(b"\n")


@given(st.lists(st.text("ab\r\n\b", max_size=12), max_size=8))
def test_how_a_stream_is_cut_does_not_change_its_lines(chunks: list[str]) -> None:
    def finished(parts: Iterable[str]) -> bytes:
        return Rank(ON_A_TERMINAL).write(*(part.encode() for part in parts)).end().lines

    assert finished(chunks) == finished(["".join(chunks)]) == finished("".join(chunks))


@given(st.lists(st.text("a#█▏\r\n", max_size=12), max_size=8), st.data())
def test_hidden_states_of_a_bar_change_nothing_wherever_it_is_cut(
    states: list[str], data: st.DataObject
) -> None:
    raw = "\r".join(states).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=3)))
    parts = [raw[a:b] for a, b in pairwise((0, *cuts, len(raw)))]
    seen = Rank(ON_A_TERMINAL).write(*(raw[at : at + 1] for at in range(len(raw)))).end().lines
    assert Rank(ON_A_TERMINAL).write(*parts).end().lines == seen


def test_a_partial_line_waits_for_its_newline() -> None:
    rank = Rank(RECORDED).write(b"one\ntw")
    assert rank.record == b"one\n"
    assert rank.write(b"o\n").record == b"one\ntwo\n"
    assert rank.end().record == b"one\ntwo\n"


def test_windows_line_ends_are_plain_newlines_even_when_cut_in_two() -> None:
    assert shown(b"a\r\nb\r\r\nc\r\n") == b"a\nb\nc\n"
    assert shown(b"a\r", b"\nb\n") == b"a\nb\n"


def test_a_line_without_end_is_shown_in_pieces_and_loses_nothing() -> None:
    for first in (b"", b"\x1b[1m"):
        rank = Rank(RECORDED).write(first, *[b"x" * 10_000] * 40)
        assert (
            len(rank.view.screen.text) + sum(len(row.cells) for row in rank.view.screen.rows)
            <= 2 * LINE_LIMIT
        )
        text = lines.without_color(rank.end().lines)
        assert text.count(b"x") == 400_000
        assert max(map(len, text.split(b"\n"))) == LINE_LIMIT


def test_pieces_are_not_cut_within_a_character() -> None:
    text = b"a" + "€".encode() * 50_000
    assert shown(text).replace(b"\n", b"") == text
    for piece in shown(text).splitlines():
        piece.decode()


def test_bytes_that_are_not_text_are_kept() -> None:
    assert shown(b"\x80" * 200_000).count(b"\x80") == 200_000
    assert shown(b"\x1b[1m\xff\xe2\x82", b"\xac\xe2\n") == b"\x1b[1m\xff\xe2\x82\xac\xe2\x1b[0m\n"


def test_a_long_line_beside_a_carriage_return_costs_linear_time() -> None:
    text = b"y" * 3_000_000 + b"\nbar\r1\n"
    start = time.process_time()
    assert shown(text).startswith(b"y" * 3_000_000 + b"\n")
    assert time.process_time() - start < 20.0  # the square of the length would take hours


# --- colours -------------------------------------------------------------------------------------------


def test_every_line_ends_its_colours_and_the_next_begins_them_again() -> None:
    raw = b"\x1b[31mred\x1b[0m plain \x1b[1mbold\nstill\x1b[m\nplain\n"
    wanted = b"\x1b[31mred\x1b[0m plain \x1b[1mbold\x1b[0m\n\x1b[1mstill\x1b[0m\nplain\n"
    assert shown(raw) == wanted
    assert shown(*(raw[at : at + 1] for at in range(len(raw)))) == wanted


def test_lines_whose_colours_end_in_them_are_passed_on_in_one_piece() -> None:
    raw = b"\x1b[32m10:00\x1b[0m | \x1b[1mINFO\x1b[0m | ready\n" * 3
    assert shown(raw[:7], raw[7:]) == raw


@pytest.mark.parametrize(
    ("style", "parameters", "after"),
    [
        ("", "1;31", "1;31"),
        ("1;31", "32", "1;32"),
        ("1;31", "", ""),
        ("1;31", "0;4", "4"),
        ("1;2;31", "22", "31"),
        ("4;31", "39;24", ""),
        ("", "38;5;208;48;2;1;2;3", "38;5;208;48;2;1;2;3"),
        ("38;5;208;1", "38;2;9;9;9", "1;38;2;9;9;9"),
        ("41;7", "49;27", ""),
        ("", "38:2::1:2:3;01", "38:2::1:2:3;1"),
        ("", "21;53", "21;53"),
        ("21", "24", ""),
        ("", "10;77;;²", ""),
        ("", "38", "38"),
    ],
)
def test_colours_add_up(style: str, parameters: str, after: str) -> None:
    assert sorted(restyled(style, parameters).split(";")) == sorted(after.split(";"))


def test_sequences_of_other_kinds_leave_no_trace() -> None:
    raw = b"\x1b]0;title\x07a\x1b]8;;http://x\x1b\\b\x1b7c\x1b(Bd\x1b[?2004he\x1b[>1uf\x1b[6ng\n"
    assert shown(raw) == b"abcdefg\n"
    assert shown(*(raw[at : at + 1] for at in range(len(raw)))) == b"abcdefg\n"
    assert shown(b"\x1b]0;" + b"t" * 100_000, b"\nnext\n").endswith(b"next\n")


# --- one terminal emulator against another -------------------------------------------------------------

_MOVES = (
    "\n",
    "\r",
    "\b",
    "\x1b[A",
    "\x1b[2A",
    "\x1b[K",
    "\x1b[2K",
    "\x1b[1K",
    "\x1b[J",
    "\x1b[C",
    "\x1b[3D",
)
_MORE = ("\x1b[5G", "\x1b[P", "\x1b[2@", "\x1b[3X", "\x1b[1E", "\x1b[F", "\t", "\x1b[B")
_WORDS = ("bar", "50%", "█▉", "e\u0301", " ", "\x1b[31mred\x1b[0m")


@given(st.lists(st.sampled_from((*_MOVES, *_MORE, *_WORDS)), max_size=40))
def test_the_screen_is_that_of_a_terminal(pieces: list[str]) -> None:
    """With the reach of all rows, so that none is finished before the end."""
    written = "".join(pieces)
    theirs = pyte.Screen(200, ROWS_LIMIT)
    theirs.set_mode(pyte.modes.LNM)
    pyte.Stream(theirs).feed(written)
    rank = Rank(StreamView(screen=Screen(rows=(ScreenRow(),), redrawn=NEVER_DONE)))
    rank.write(*(piece.encode() for piece in pieces))
    rows = [lines.without_color(row.line()).decode() for row in rank.view.screen.rows]
    ours = [unicodedata.normalize("NFC", row).expandtabs(8).rstrip() for row in rows]
    assert ours + [""] * (ROWS_LIMIT - len(ours)) == [row.rstrip() for row in theirs.display]
    if rank.view.screen.rows:
        assert (rank.view.screen.at, rank.view.screen.column) == (theirs.cursor.y, theirs.cursor.x)


@given(
    st.lists(
        st.sampled_from(
            (*_MOVES, *_MORE, *_WORDS, "\x1b[?25l", "\x1b[?25h", "\x1b[H", "\x1b[2J", "\x1b[9;3H")
        )
    )
)
def test_whatever_is_written_the_screen_is_bounded_and_its_cursor_in_it(pieces: list[str]) -> None:
    rank = Rank(RECORDED)
    for piece in pieces * 3:
        rank.write(piece.encode(), after_s=0.03)
        now = rank.view.screen
        assert len(now.rows) <= ROWS_LIMIT
        assert not now.rows or 0 <= now.at < len(now.rows)


# --- progress bars on a terminal -----------------------------------------------------------------------


@pytest.mark.parametrize("style", ["\r{}", "{}\r"])
def test_a_bar_is_live_until_its_newline(style: str) -> None:
    rank = Rank(ON_A_TERMINAL)
    for percent in range(101):
        rank.write(style.format(f"{percent}%").encode(), after_s=0.1)
        if percent:
            assert (rank.live, rank.lines) == ([f"{percent}%"], b"")
    assert rank.write(b"\n").wait(SETTLE_S).lines == b"100%\n"
    assert rank.live == []
    assert rank.write(b"next\n").lines == b"100%\nnext\n"


def test_an_erased_bar_leaves_nothing() -> None:
    for erase in (b"\r     \r", b"\r\x1b[2K", b"\x1b[2K\r", b"\x1b[1K\r"):
        rank = Rank(ON_A_TERMINAL).write(b"\r50%", erase)
        assert rank.live == []
        assert rank.write(b"done\n").end().lines == b"done\n"


def tqdm_row(position: int, text: str) -> bytes:
    return b"\n" * position + b"\r" + text.encode() + b"\x1b[A" * position


def test_nested_bars_of_tqdm_are_redrawn_in_place() -> None:
    rank = Rank(ON_A_TERMINAL).write(tqdm_row(0, "epoch 0"))
    for step in range(3):
        rank.write(
            *(tqdm_row(1, f"step {step}")[at : at + 1] for at in range(10)), b"\x1b[A"[2:], after_s=0.01
        )
        rank.write(tqdm_row(1, f"step {step}"), after_s=0.5)
        assert (rank.live, rank.lines) == (["epoch 0", f"step {step}"], b"")
    rank.write(tqdm_row(0, " " * 7 + "\r"), tqdm_row(1, " " * 6 + "\r"), b"a message\n")
    rank.write(tqdm_row(0, "epoch 1"), tqdm_row(1, "step 3"))
    assert (rank.live, rank.lines) == (["epoch 1", "step 3"], b"a message\n")
    rank.write(tqdm_row(1, "      \r"), b"\repoch 2\n")
    assert rank.wait(FORGET_S).lines == b"a message\nepoch 2\n"
    assert rank.live == []
    rank.write(b"in the place of a bar\n").wait(SETTLE_S)
    assert rank.write(b"plain\n").lines.endswith(b"place of a bar\nplain\n")  # at once again


def rich_frame(*rows: str, before: int = 0, log: str = "") -> bytes:
    return b"\r\x1b[2K" + b"\x1b[1A\x1b[2K" * before + (log + "\n".join(rows)).encode()


def test_a_display_of_rich_is_redrawn_over_all_its_rows() -> None:
    rank = Rank(ON_A_TERMINAL).write(b"\x1b[?25l", b"train 0%\n", b"valid 0%", after_s=0.2)
    assert (rank.live, rank.lines) == (["train 0%", "valid 0%"], b"")
    rank.wait(100.0).write(rich_frame("train 1%", "valid 1%", before=1))
    assert (rank.live, rank.lines) == (["train 1%", "valid 1%"], b"")
    rank.write(rich_frame("train 2%", "valid 2%", before=1, log="a message\n"))
    rank.write(rich_frame("train 3%", "valid 3%", before=1))
    assert (rank.live, rank.lines) == (["train 3%", "valid 3%"], b"a message\n")
    rank.write(b"\n\x1b[?25h").wait(SETTLE_S)
    assert (rank.live, rank.lines) == ([], b"a message\ntrain 3%\nvalid 3%\n")


def test_a_display_of_rich_grows_and_shrinks() -> None:
    """A table to which rows are added, with messages between; then a task that is removed."""
    rank = Rank(ON_A_TERMINAL).write(b"\x1b[?25l" + rich_frame("head"))
    shown = ["head"]
    for step in range(4):
        log = f"message {step}\n" if step % 2 else ""
        rank.write(rich_frame(*shown, f"row {step}", before=len(shown) - 1, log=log), after_s=5.0)
        shown = [*shown, f"row {step}"]
        assert rank.live[-len(shown) :] == shown
    assert rank.lines == b"message 1\n"
    rank.write(rich_frame(*shown, before=len(shown) - 1))
    assert (rank.live, rank.lines) == (shown, b"message 1\nmessage 3\n")
    rank.write(rich_frame("one", before=len(shown) - 1), b"\r\x1b[2Kanother\none", after_s=0.1)
    rank.write(rich_frame("one"), b"\n\x1b[?25h").wait(SETTLE_S)
    assert (rank.live, rank.lines) == ([], b"message 1\nmessage 3\nanother\none\n")


def test_a_display_of_rich_may_arrive_in_pieces() -> None:
    rank = Rank(ON_A_TERMINAL).write(b"\x1b[?25l" + rich_frame("a", "b", "c"))
    for log in ("one\n", "two\n", "three\n"):
        frame = rich_frame("a", "b", "c", before=2, log=log)
        rank.write(*(frame[at : at + 1] for at in range(len(frame))), after_s=0.01)
    assert (rank.live[-3:], rank.lines) == (["a", "b", "c"], b"one\ntwo\n")


def test_a_program_that_hides_the_cursor_and_goes_on_with_lines_gets_them_out() -> None:
    """A spinner in one row, and lines that are printed above it."""
    rank = Rank(ON_A_TERMINAL).write(b"\x1b[?25l")
    for step in range(20):
        rank.write(f"\r\x1b[Kline {step}\n/ {step}%".encode(), after_s=1.0)
        assert len(rank.live) <= 3
    assert rank.lines == b"".join(b"line %d\n" % step for step in range(19))


def test_a_display_that_others_write_below_is_finished() -> None:
    rank = Rank(ON_A_TERMINAL).write(b"\x1b[?25l" + rich_frame("a", "b"), rich_frame("a", "b", before=1))
    rank.write(b"\nfrom a library in C\n", b"more of it\n", after_s=FORGET_S)
    assert rank.lines == b"a\nb\nfrom a library in C\n"


def test_a_list_of_downloads_whose_rows_are_redrawn_in_any_order_stays_in_place() -> None:
    rank = Rank(ON_A_TERMINAL).write(b"first\nsecond\nthird\n")
    rank.write(b"\ra 0%\n\rb 0%\n\rc 0%\n", b"\x1b[3A\ra 1%\x1b[3B")
    for percent in range(2, 9):
        for above, name in ((1, "c"), (3, "a"), (2, "b")):
            rank.write(f"\x1b[{above}A\r\x1b[2K{name} {percent}%\r\x1b[{above}B".encode(), after_s=0.3)
    assert rank.lines == b"first\nsecond\nthird\n"
    assert rank.live == ["a 8%", "b 8%", "c 8%"]


def test_a_dashboard_that_clears_the_screen_is_live() -> None:
    rank = Rank(ON_A_TERMINAL).write(b"loading\n")
    for load in range(3):
        rank.write(b"\x1b[2J\x1b[H" + f"GPU 0: {load}%\nGPU 1: {load}%\n".encode(), after_s=1.0)
    assert rank.live == ["GPU 0: 2%", "GPU 1: 2%"]
    assert rank.lines == b"loading\n"
    rank.wait(FORGET_S)
    assert rank.lines == b"loading\nGPU 0: 2%\nGPU 1: 2%\n"


def test_one_who_goes_back_no_more_gets_its_lines_at_once_again() -> None:
    rank = Rank(ON_A_TERMINAL).write(b"a\nb\n\x1b[2A", b"\rA\nB\n", b"log\n", b"log\n")
    assert rank.wait(FORGET_S).lines.endswith(b"log\nlog\n")
    assert rank.write(b"now\n").lines.endswith(b"now\n")


def test_rows_beyond_the_limit_are_finished() -> None:
    rank = Rank(ON_A_TERMINAL).write(b"\x1b[?25l", *(b"%d\n" % i for i in range(3 * ROWS_LIMIT)))
    assert rank.lines == b"".join(b"%d\n" % i for i in range(2 * ROWS_LIMIT + 1))
    long = Rank(ON_A_TERMINAL).write(b"\x1b[?25l" + b"z" * 10_000 + b"\nx")
    assert long.lines == b"z" * 10_000 + b"\n"


@pytest.mark.parametrize(
    "piece", ["\x1b[1000@", "\x1b[1000@x", "\u0301" * 1000, "\t\r\t", "x\x1b[1000C", "漢\b"]
)
def test_no_row_grows_without_end(piece: str) -> None:
    rank = Rank(ON_A_TERMINAL).write(b"\x1b[mxyz\r\x1b[C", *[piece.encode() * 10] * 30)
    cells = [cell for row in rank.view.screen.rows for cell in row.cells]
    assert sum(len(style) + len(char) for style, char in cells) < 3 * LINE_LIMIT


def test_a_wide_character_that_is_cut_leaves_a_blank() -> None:
    assert shown("漢\b\x1b[31mx\x1b[0m\n".encode()) == b" \x1b[31mx\x1b[0m\n"
    assert shown("漢漢\rx\n".encode()) == "x 漢\n".encode()
    for cut in (("e\u0301",), ("e", "\u0301")):
        assert shown(b"\x1b[m", *(each.encode() for each in cut)) == "e\u0301\n".encode()
    assert ScreenRow(tuple(cells_of("\u0301e", "", 0))).line() == "\u0301e".encode()


# --- prompts -------------------------------------------------------------------------------------------


def test_unfinished_text_is_a_prompt_once_it_has_stood_for_a_moment() -> None:
    rank = Rank(ON_A_TERMINAL).write(b"so far\n(Pdb) ")
    assert (rank.lines, rank.prompt) == (b"so far\n", None)
    assert rank.wait(PROMPT_AFTER_S / 2).prompt is None
    assert rank.wait(PROMPT_AFTER_S / 2).prompt == "(Pdb) "
    assert rank.write(b"p x\b\x1b[K").prompt == "(Pdb) p "  # as an editor of lines echoes it
    assert rank.write(b"x\n", b"42\n").prompt is None
    assert rank.end().lines == b"so far\n(Pdb) p x\n42\n"


def test_a_prompt_after_a_bar_that_has_just_ended_is_seen() -> None:
    rank = Rank(ON_A_TERMINAL).write(b"\r100%\n(Pdb) ").wait(PROMPT_AFTER_S)
    assert (rank.lines, rank.prompt) == (b"100%\n", "(Pdb) ")


def test_a_bar_is_not_a_prompt() -> None:
    assert Rank(ON_A_TERMINAL).write(b"\r10%").wait(10.0).prompt is None
    assert Rank(ON_A_TERMINAL).write(b"\x1b[?25lrow 1\nrow 2").wait(10.0).prompt is None


# --- progress bars in a log ----------------------------------------------------------------------------


def test_an_erased_bar_is_not_in_the_log() -> None:
    assert shown(b"\r50%", b"\r     \r", b"done\n") == b"done\n"
    assert shown(b"\r50%", b"\r\x1b[2K\r") == b""
    assert shown(b"\r   \r") == b""


def test_finished_bars_within_one_chunk_keep_their_last_state() -> None:
    assert shown(b"1%\r2%\r3%\nplain\n\r7%\r8%\r\n") == b"3%\nplain\n8%\n"


def test_a_bar_without_end_holds_only_its_latest_state() -> None:
    rank = Rank(RECORDED)
    for _ in range(50):
        rank.write(b"\r 50%|####" * 600)
        assert sum(len(row.cells) for row in rank.view.screen.rows) < 100


def test_a_screen_that_shows_nothing_leaves_nothing() -> None:
    assert screen.finish(Screen()) == b""
    assert screen.finish(Screen(rows=(ScreenRow(),))) == b""


# --- more than anybody can read, and bytes that are no text ----------------------------------------------


@pytest.mark.parametrize(
    "unit", [b"\x1b[31mred goes on\n\x1b[0m\x1b[1A\x1b[2K", b"\0\xff\x1b[A\r\n", b"\r\x1b[3C|"]
)
def test_a_flood_is_not_interpreted(unit: bytes) -> None:
    chunk = unit * (65536 // len(unit))
    rank = Rank(ON_A_TERMINAL)
    rank.write(*[chunk] * 20)
    began = time.process_time()
    rank.write(*[chunk] * 80)
    assert time.process_time() - began < 20.0  # 0.2 s; with interpretation a minute
    assert rank.end().lines.endswith(b"\n")
    assert rank.write(b"plain\n", after_s=1.0).lines.endswith(b"plain\n")
    assert rank.write(b"\r10%", after_s=1.0).live == ["10%"]
