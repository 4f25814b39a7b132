"""The lines of ranks as people see them."""

from __future__ import annotations

import pyte
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.output import lines, live_area
from launcher.output.lines import RankLabel
from launcher.output.live_area import HELD_LIMIT, LiveBlock, PlainView, Size, drawn, erased, wraps_anew
from launcher.output.screen import ScreenRow, cells_of
from launcher.settings.spec import LogSpec, StreamChoice, Streams

LABEL = RankLabel("n0", rank=5, local_rank=1, role="trainer", generation=2)


def test_invalid_utf8_is_replaced_and_newlines_survive() -> None:
    assert lines.presentable(b"ok \xff\xc3\nnext \xe2\x82\n").decode() == "ok ��\nnext �\n"
    assert lines.presentable("grün €\n".encode()) == "grün €\n".encode()


def test_cursor_movement_is_removed_and_colours_stay() -> None:
    raw = b"\x1b[31mred\x1b[0m\x1b[A\x1b[2K\x1b[?25lx\x1b]0;title\x07y\x1bcz\n"
    assert lines.presentable(raw) == b"\x1b[31mred\x1b[0mxyz\n"


def test_colours_can_be_removed() -> None:
    assert lines.without_color(b"\x1b[1;38:5:9mred\x1b[0m\tx\n") == b"red\tx\n"


def test_control_bytes_do_not_reach_a_terminal() -> None:
    raw = b"a\x07\x08\x0e\tb\n"
    assert lines.presentable(raw) == b"a\tb\n"


def test_control_characters_of_eight_bits_do_not_reach_a_terminal() -> None:
    raw = "grün \u009b31m\u0090q\u009c\u0085 €\n".encode()
    assert lines.presentable(raw) == "grün 31mq €\n".encode()


def test_every_line_gets_the_prefix_empty_ones_too() -> None:
    assert lines.prefixed(b"a\n\nb\n", b"[0] ") == b"[0] a\n[0] \n[0] b\n"
    assert lines.prefixed(b"a\nb", b"[0] ") == b"[0] a\n[0] b"
    assert lines.prefixed(b"", b"[0] ") == b""


@given(st.lists(st.text("abc. ", max_size=6)), st.lists(st.text("abc.", max_size=2), min_size=1))
def test_matching_keeps_lines_with_any_needle(texts: list[str], needles: list[str]) -> None:
    pattern = lines.any_of(needles)
    assert pattern
    found = lines.matching(b"".join(t.encode() + b"\n" for t in texts), pattern)
    wanted = [t for t in texts if any(n in t for n in needles)]
    assert found.decode() == "".join(t + "\n" for t in wanted)


def test_without_filters_there_is_nothing_to_match() -> None:
    assert lines.any_of(()) is None


def test_prefix_fields() -> None:
    template = "{node}/{rank}/{local_rank}/{role}/{generation:02d}"
    assert lines.prefix_of(template, LABEL) == "n0/5/1/trainer/02"


@pytest.mark.parametrize("template", ["{nod}", "{0}", "{", "{rank.x}", "{node:d}"])
def test_a_bad_prefix_is_refused_with_the_fields_it_may_have(template: str) -> None:
    with pytest.raises(ValueError, match="local_rank"):
        lines.prefix_of(template, LABEL)


def test_neighbouring_ranks_differ_in_colour() -> None:
    assert lines.painted("[x] ", 0) != lines.painted("[x] ", 1)
    assert lines.painted("[x] ", 0).endswith("\x1b[0m")
    assert lines.painted("", 0) == ""


@pytest.mark.parametrize(
    ("when", "is_terminal", "environ", "colored"),
    [
        ("auto", True, {}, True),
        ("auto", False, {}, False),
        ("auto", True, {"NO_COLOR": "1"}, False),
        ("auto", True, {"NO_COLOR": ""}, True),  # as no-color.org has it
        ("auto", True, {"TERM": "dumb"}, False),
        ("always", False, {"NO_COLOR": "1"}, True),
        ("never", True, {}, False),
    ],
)
def test_when_output_is_colored(when: str, is_terminal: bool, environ: dict[str, str], colored: bool) -> None:
    assert lines.is_colored(when, is_terminal, environ) is colored


def test_which_streams_are_shown() -> None:
    out, err = Streams.OUT, Streams.ERR
    assert lines.is_shown(LogSpec(), 0, out)
    redirected = LogSpec(redirects=StreamChoice(Streams.NONE, ((1, out),)))
    assert lines.is_shown(redirected, 0, out)
    assert not lines.is_shown(redirected, 1, out)
    assert lines.is_shown(redirected, 1, err)
    teed = LogSpec(redirects=StreamChoice(Streams.ALL), tee=StreamChoice(Streams.ERR))
    assert lines.is_shown(teed, 0, err)
    assert not lines.is_shown(teed, 0, out)
    assert not lines.is_shown(LogSpec(tee=StreamChoice(Streams.ALL), local_ranks_filter=(1,)), 0, out)


def test_whose_bars_are_redrawn() -> None:
    def drawn(log: LogSpec) -> list[int]:
        return [rank for rank in range(4) if lines.draws_bars(log, rank)]

    assert drawn(LogSpec()) == [0]
    assert drawn(LogSpec(local_ranks_filter=(2, 3))) == [2]
    assert drawn(LogSpec(bars="all")) == [0, 1, 2, 3]
    assert drawn(LogSpec(bars="none")) == []
    assert drawn(LogSpec(bars=(1, 3))) == [1, 3]


def test_a_dumb_terminal_cannot_redraw() -> None:
    assert lines.can_redraw(True, {"TERM": "xterm"})
    assert not lines.can_redraw(True, {"TERM": "dumb"})
    assert not lines.can_redraw(False, {})


# --- the rows at the bottom of a terminal, as a terminal shows them -----------------------------------


LABEL_OF_AREA = tuple(cells_of("[n0:0] ", "36", 0))
SIZE = Size(40, 10)


def row(text: str, style: str = "") -> ScreenRow:
    return ScreenRow(tuple(cells_of(text, style, 0)))


def bars(*texts: str) -> LiveBlock:
    return LiveBlock(LABEL_OF_AREA, tuple(row(text) for text in texts))


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
    area = drawn((bars("epoch 1", "step 7"), LiveBlock(LABEL_OF_AREA, ())), "2 ranks\nrunning", SIZE, True)
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
    prompt = LiveBlock(LABEL_OF_AREA, (), row("(Pdb) p x"), column=8)
    seen = Seen().feed(drawn((bars("50%"), prompt), "status", SIZE, True))
    assert seen.text == ["[n0:0] (Pdb) p x"]
    assert seen.screen.cursor.x == len("[n0:0] (Pdb) p ")
    at_its_end = drawn((LiveBlock(LABEL_OF_AREA, (), row("(Pdb) "), column=6),), "", SIZE, False)
    assert at_its_end == b"[n0:0] (Pdb) "


def test_control_characters_of_eight_bits_are_not_drawn() -> None:
    assert drawn((LiveBlock((), (row("a\u009b31mb"),)),), "", SIZE, True) == b"a31mb"


# --- what a pipe gets of a stream: its bytes, in whole lines where that is possible -------------------


@given(st.lists(st.binary(max_size=40), max_size=20), st.booleans())
def test_every_byte_passes_in_its_order(chunks: list[bytes], shows_prompts: bool) -> None:
    view, shown = PlainView(shows_prompts), b""
    for now, chunk in enumerate(chunks):
        view, more = live_area.feed_plain(view, chunk, now)
        view, late = live_area.update_plain(view, now + 0.5)
        shown += more + late
    assert shown + view.held == b"".join(chunks)


def test_a_line_is_shown_when_it_ends() -> None:
    view, shown = live_area.feed_plain(PlainView(), b"one\ntw", 0.0)
    assert (shown, view.due_at) == (b"one\n", None)
    assert live_area.feed_plain(view, b"o\n", 9.0) == (PlainView(), b"two\n")


def test_a_long_line_is_shown_in_parts() -> None:
    view, shown = live_area.feed_plain(PlainView(), b"x" * HELD_LIMIT, 0.0)
    assert shown == b""
    assert live_area.feed_plain(view, b"x", 0.0) == (PlainView(), b"x" * (HELD_LIMIT + 1))


def test_a_bar_is_shown_as_it_is_once_a_second() -> None:
    view, _ = live_area.feed_plain(PlainView(), b"\r10%", 0.0)
    view, shown = live_area.feed_plain(view, b"\r20%", 0.9)
    assert (shown, view.due_at) == (b"", 1.0)
    assert live_area.update_plain(view, 0.9) == (view, b"")
    view, shown = live_area.update_plain(view, 1.0)
    assert shown == b"\r10%\r20%"
    assert live_area.feed_plain(view, b"\r100%\n", 1.1) == (PlainView(), b"\r100%\n")


def test_a_simple_terminal_shows_a_prompt() -> None:
    view, shown = live_area.feed_plain(PlainView(shows_prompts=True), b"so far\n(Pdb) ", 0.0)
    assert shown == b"so far\n"
    assert view.due_at is not None
    assert live_area.update_plain(view, view.due_at) == (PlainView(True), b"(Pdb) ")


# --- equal lines of many ranks -------------------------------------------------------------------------

ALL = {"stdout": frozenset(range(64))}


def shown_after(arrivals: list[tuple[int, bytes]], kind: str = "stdout") -> list[tuple[int, bytes]]:
    held: list[lines.HeldLine[int]] = []
    for rank, text in arrivals:
        held = lines.hold(held, rank, kind, text, 0.0)
    return lines.shown_once(held, lambda rank: rank)


def test_equal_lines_of_64_ranks_are_shown_once() -> None:
    assert shown_after([(rank, b"loading\n") for rank in reversed(range(64))]) == [
        (0, b"loading (x 64 ranks)\n")
    ]


def test_a_line_does_not_pass_an_earlier_line_of_its_rank() -> None:
    shown = shown_after([(0, b"a\nb\n"), (1, b"b\na\n")])
    assert shown == [(0, b"a\nb (x 2 ranks)\n"), (1, b"a\n")]
    twice = [(0, b"same\nsame\n"), (1, b"same\nsame\n")]
    assert shown_after(twice) == [(0, b"same (x 2 ranks)\nsame (x 2 ranks)\n")]


def test_equal_lines_of_stdout_and_stderr_stay_apart() -> None:
    held = lines.hold(lines.hold([], 0, "stdout", b"a\n", 0.0), 1, "stderr", b"a\n", 0.0)
    assert [line.by for line in held] == [(0,), (1,)]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([b"a\n", b"b\n", b"a\nb\n", b"c\n"])), max_size=12)
)
def test_each_rank_keeps_its_lines_and_their_order(arrivals: list[tuple[int, bytes]]) -> None:
    held: list[lines.HeldLine[int]] = []
    for rank, text in arrivals:
        held = lines.hold(held, rank, "stdout", text, 0.0)
    for rank in range(4):
        assert [line.text for line in held if rank in line.by] == [
            line for who, text in arrivals if who == rank for line in text.split(b"\n")[:-1]
        ]


@given(st.lists(st.integers(0, 3), max_size=12))
def test_lines_without_an_equal_one_keep_their_order_and_their_label(ranks: list[int]) -> None:
    arrivals = [(rank, b"line %d\n" % at) for at, rank in enumerate(ranks)]
    shown = shown_after(arrivals)
    assert b"".join(text for _, text in shown) == b"".join(text for _, text in arrivals)
    assert [rank for rank, text in shown for _ in text.splitlines()] == ranks


def test_a_line_waits_until_all_have_written_it_but_not_long() -> None:
    held = lines.hold([], 0, "stdout", b"a\nb\n", 0.0)
    assert lines.count_of_due(held, 0.0, ALL) == 0
    assert lines.count_of_due(held, lines.HELD_S, ALL) == 2
    assert (
        lines.count_of_due(lines.hold(held, 1, "stdout", b"a\n", 0.0), 0.0, {"stdout": frozenset((0, 1))})
        == 1
    )
    assert lines.count_of_due(held, 0.0, {"stdout": frozenset()}) == 2  # all have ended
    held = lines.hold(held, 1, "stdout", b"a\n", 0.1)
    assert lines.count_of_due(held, lines.HELD_S, ALL) == 0
    assert lines.count_of_due(held, 0.1 + lines.LONGEST_HELD_S, ALL) == 2


def test_equal_lines_that_come_one_by_one_are_shown_once_but_not_late() -> None:
    held: list[lines.HeldLine[int]] = []
    for rank in range(64):  # a busy machine: over three seconds from the first to the last
        assert lines.count_of_due(held, rank * 0.05, ALL) == 0
        held = lines.hold(held, rank, "stdout", b"loading\n", rank * 0.05)
    assert lines.shown_once(held, lambda rank: rank) == [(0, b"loading (x 64 ranks)\n")]
    assert lines.count_of_due(held, 3.15, ALL) == 1
    for rank in range(0, 20):  # without an end
        held = lines.hold(held if rank else [], rank, "stdout", b"loading\n", rank * 0.5)
    assert held[0].until == lines.MOST_HELD_S


def test_a_line_of_one_rank_does_not_wait_for_equal_lines_of_others() -> None:
    held = lines.hold([], 0, "stdout", b"loading\nmine\n", 0.0)
    for rank in range(1, 10):
        held = lines.hold(held, rank, "stdout", b"loading\n", rank * 0.1)
    assert held[0].until == lines.LONGEST_HELD_S
    assert lines.count_of_due(held, 0.69, ALL) == 0
    assert lines.count_of_due(held, lines.LONGEST_HELD_S, ALL) == 2
