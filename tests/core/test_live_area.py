"""The rows at the bottom of a terminal, as a terminal shows them."""

from __future__ import annotations

import pyte
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.output.live_area import LiveBlock, Size, drawn, erased, wraps_anew
from launcher.output.screen import ScreenRow, cells_of

LABEL = tuple(cells_of("[n0:0] ", "36", 0))
SIZE = Size(40, 10)


def row(text: str, style: str = "") -> ScreenRow:
    return ScreenRow(tuple(cells_of(text, style, 0)))


def bars(*texts: str) -> LiveBlock:
    return LiveBlock(LABEL, tuple(row(text) for text in texts))


class Seen:
    """A terminal of that size."""

    def __init__(self, size: Size = SIZE) -> None:
        self.screen = pyte.Screen(size.columns, size.rows)
        self.screen.set_mode(pyte.modes.LNM)
        self._stream = pyte.ByteStream(self.screen)

    def feed(self, data: bytes) -> Seen:
        self._stream.feed(data)
        return self

    @property
    def text(self) -> list[str]:
        rows = [row.rstrip() for row in self.screen.display]
        while rows and not rows[-1]:
            rows.pop()
        return rows


def test_bars_stand_above_the_status() -> None:
    area = drawn((bars("epoch 1", "step 7"), LiveBlock(LABEL, ())), "2 ranks\nrunning", SIZE, True)
    assert Seen().feed(area).text == ["[n0:0] epoch 1", "[n0:0] step 7", "2 ranks running"]
    assert drawn((), "", SIZE, True) == b""
    assert drawn((), "status", SIZE, True) == b"status"


@given(
    st.integers(1, 30), st.integers(1, 30), st.lists(st.text("a漢\te\u0301\udcff", max_size=40), max_size=30)
)
def test_an_area_fits_every_terminal_and_is_erased_without_a_trace(
    columns: int, rows: int, texts: list[str]
) -> None:
    area = drawn((bars(*texts),), "s" * 50, Size(columns, rows), True)
    assert area.count(b"\n") <= max(1, rows // 2)
    if columns < 2 or rows < 4:
        return
    seen = Seen(Size(columns, rows)).feed(b"log\n"[-columns:] + area)
    assert seen.screen.cursor.y == area.count(b"\n") + 1
    area.decode()
    assert seen.feed(erased(area)).text == Seen(Size(columns, rows)).feed(b"log\n"[-columns:]).text
    assert (seen.screen.cursor.x, seen.screen.cursor.y) == (0, 1)


@pytest.mark.parametrize("status", ["", "s" * 50])
def test_the_echo_of_ctrl_c_does_not_leave_the_area(status: str) -> None:
    area = drawn((bars("b" * 60, "c" * 60),), status, SIZE, True)
    seen = Seen().feed(b"log\n" + area + b"^C^C" + erased(area))
    assert seen.text == ["log"]


def test_an_area_that_a_narrower_window_has_wrapped_is_erased() -> None:
    area = drawn((bars("b" * 30, "漢" * 14, "c"),), "s" * 60, SIZE, True)
    assert [len(row) for row in Seen().feed(area).text] == [37, 21, 8, 35]
    seen = Seen(Size(20, 10)).feed(b"log\n" + area)
    assert len(seen.text) == 1 + 2 + 2 + 1 + 2
    assert seen.feed(erased(area, 20)).text == ["log"]


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({"TERM": "xterm-256color"}, True),
        ({"TERM": "xterm", "XTERM_VERSION": "XTerm(390)"}, False),
        ({"TERM": "tmux-256color", "TMUX": "/tmp/x", "XTERM_VERSION": "XTerm(390)"}, True),
        ({"TERM": "screen", "STY": "1.pts"}, False),
        ({"TERM": "rxvt-unicode"}, False),
    ],
)
def test_which_terminals_wrap_rows_anew(environ: dict[str, str], wanted: bool) -> None:
    assert wraps_anew(environ) is wanted


def test_nothing_is_erased_where_nothing_was_drawn() -> None:
    assert erased(b"") == b""
    assert erased(b"one row") == b"\r\x1b[K"


def test_a_wide_character_is_cut_as_a_whole_and_a_tab_is_blank() -> None:
    assert drawn((LiveBlock((), (row("aa漢b"),)),), "", Size(8, 9), True) == b"aa "
    assert drawn((LiveBlock((), (row("a\t漢"),)),), "", SIZE, True) == "a       漢".encode()


@pytest.mark.parametrize(("is_colored", "wanted"), [(True, b"\x1b[31mbar\x1b[0m"), (False, b"bar")])
def test_colours_are_shown_if_wanted(is_colored: bool, wanted: bytes) -> None:
    assert drawn((LiveBlock((), (row("bar", "31"),)),), "", SIZE, is_colored) == wanted


def test_a_prompt_is_alone_with_the_cursor_where_the_rank_has_put_it() -> None:
    prompt = LiveBlock(LABEL, (), row("(Pdb) p x"), column=8)
    seen = Seen().feed(drawn((bars("50%"), prompt), "status", SIZE, True))
    assert seen.text == ["[n0:0] (Pdb) p x"]
    assert seen.screen.cursor.x == len("[n0:0] (Pdb) p ")
    at_its_end = drawn((LiveBlock(LABEL, (), row("(Pdb) "), column=6),), "", SIZE, False)
    assert at_its_end == b"[n0:0] (Pdb) "


def test_control_characters_of_eight_bits_are_not_drawn() -> None:
    assert drawn((LiveBlock((), (row("a\u009b31mb"),)),), "", SIZE, True) == b"a31mb"
