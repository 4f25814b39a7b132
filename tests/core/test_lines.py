"""The lines of ranks as people see them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.output import lines
from launcher.output.lines import RankLabel
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
