"""Bytes in, whole lines out."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.output import lines
from launcher.output.lines import LINE_LIMIT, Held, RankLabel
from launcher.settings.spec import LogSpec, StreamChoice, Streams

LABEL = RankLabel("n0", rank=5, local_rank=1, role="trainer", generation=2)


def shown(*chunks: bytes, at: float = 0.0) -> bytes:
    """All that is shown of a stream that ends after these chunks, all at one instant."""
    held, out = Held(), b""
    for chunk in chunks:
        held, text = lines.feed(held, chunk, at)
        out += text
    return out + lines.finish(held)


@given(st.lists(st.binary(max_size=40).map(lambda b: b.replace(b"\r", b"")), max_size=20))
def test_without_carriage_returns_the_text_is_unchanged_whatever_the_chunks(chunks: list[bytes]) -> None:
    text = b"".join(chunks)
    assert shown(*chunks) == (text if not text or text.endswith(b"\n") else text + b"\n")


@given(st.lists(st.text("ab\r\n", max_size=12), max_size=8), st.floats(0, 10))
def test_every_output_is_whole_lines_without_carriage_returns(chunks: list[str], at: float) -> None:
    held = Held()
    for chunk in chunks:
        held, text = lines.feed(held, chunk.encode(), at)
        assert b"\r" not in text
        assert not text or text.endswith(b"\n")


@given(st.lists(st.text("ab\r\n", max_size=12), max_size=8))
def test_how_a_stream_is_cut_does_not_change_its_finished_lines(chunks: list[str]) -> None:
    # updated_at far ahead: no updates in between, so only what newlines complete is shown
    def finished(parts: list[str]) -> bytes:
        held, out = Held(updated_at=1e9), b""
        for part in parts:
            held, text = lines.feed(held, part.encode(), 0.0)
            out += text
        return out

    assert finished(chunks) == finished(["".join(chunks)]) == finished(list("".join(chunks)))


def test_a_partial_line_waits_for_its_newline() -> None:
    held, text = lines.feed(Held(), b"one\ntw", 0.0)
    assert text == b"one\n"
    held, text = lines.feed(held, b"o\n", 0.0)
    assert text == b"two\n"
    assert lines.finish(held) == b""


def test_windows_line_ends_are_plain_newlines_even_when_cut_in_two() -> None:
    assert shown(b"a\r\nb\r\r\nc\r\n") == b"a\nb\nc\n"
    assert shown(b"a\r", b"\nb\n") == b"a\nb\n"


@pytest.mark.parametrize("style", ["\r{}", "{}\r"])
def test_a_progress_bar_is_shown_once_a_second_and_at_its_end(style: str) -> None:
    held, out = Held(), []
    for percent in range(101):  # ten a second
        held, text = lines.feed(held, style.format(f"{percent}%").encode(), percent / 10)
        out += text.split()
    held, text = lines.feed(held, b"\nnext\n", 10.05)
    out += text.split()
    assert out == [*(f"{p}%".encode() for p in range(0, 101, 10)), b"next"]


def test_the_last_state_is_shown_even_when_it_came_within_the_second() -> None:
    held, text = lines.feed(Held(), b"\r10%", 0.0)
    assert text == b"10%\n"
    held, text = lines.feed(held, b"\r20%\r30%", 0.1)
    assert text == b""
    held, text = lines.feed(held, b"\r100%\nx\n", 0.2)
    assert text == b"100%\nx\n"


def test_a_bar_that_goes_quiet_is_due_and_then_no_more() -> None:
    held, _ = lines.feed(Held(), b"\r1%", 5.0)
    assert lines.due_at(held) is None  # shown at once
    held, _ = lines.feed(held, b"\r2%", 5.2)
    assert lines.due_at(held) == 6.0
    assert lines.update(held, 5.9) == (held, b"")
    held, text = lines.update(held, 6.0)
    assert text == b"2%\n"
    assert lines.due_at(held) is None
    assert lines.finish(held) == b""


def test_a_wiped_bar_leaves_nothing() -> None:
    assert shown(b"\r50%", b"\r     \r", b"done\n") == b"50%\ndone\n"
    assert shown(b"\r50%", b"\r\x1b[2K\r") == b"50%\n"
    assert lines.feed(Held(), b"\r   \r", 0.0)[1] == b""


def test_finished_bars_within_one_chunk_keep_their_last_state() -> None:
    assert shown(b"1%\r2%\r3%\nplain\n\r7%\r8%\r\n") == b"3%\nplain\n8%\n"


def test_a_line_without_end_is_shown_in_pieces_and_loses_nothing() -> None:
    held, out = Held(), b""
    for _ in range(40):
        held, text = lines.feed(held, b"x" * 10_000, 0.0)
        out += text
        assert len(held.text) <= LINE_LIMIT
    out += lines.finish(held)
    assert out.count(b"x") == 400_000
    assert max(map(len, out.split(b"\n"))) == LINE_LIMIT


def test_pieces_are_not_cut_within_a_character() -> None:
    text = b"a" + "€".encode() * 50_000
    assert shown(text).replace(b"\n", b"") == text
    for piece in shown(text).splitlines():
        piece.decode()


def test_bytes_that_are_no_utf8_are_cut_as_well() -> None:
    assert shown(b"\x80" * 200_000).count(b"\x80") == 200_000


def test_a_bar_without_end_holds_only_its_latest_state() -> None:
    held = Held()
    for _ in range(50):
        held, _ = lines.feed(held, b"\r 50%|####" * 6000, 0.0)
        assert len(held.text) < 100


def test_a_long_line_beside_a_carriage_return_costs_linear_time() -> None:
    text = b"y" * 3_000_000 + b"\nbar\r1\n"
    start = time.process_time()
    assert shown(text) == b"y" * 3_000_000 + b"\n1\n"
    assert time.process_time() - start < 2.0  # the square of the length would take hours


def test_invalid_utf8_is_replaced_and_newlines_survive() -> None:
    assert lines.presentable(b"ok \xff\xc3\nnext \xe2\x82\n", False).decode() == "ok ��\nnext �\n"
    assert lines.presentable("grün €\n".encode(), True) == "grün €\n".encode()


def test_cursor_movement_is_removed_and_colours_stay() -> None:
    raw = b"\x1b[31mred\x1b[0m\x1b[A\x1b[2K\x1b[?25lx\x1b]0;title\x07y\x1bcz\n"
    assert lines.presentable(raw, False) == b"\x1b[31mred\x1b[0mxyz\n"


def test_colours_can_be_removed() -> None:
    assert lines.without_color(b"\x1b[1;38:5:9mred\x1b[0m\tx\n") == b"red\tx\n"


def test_control_bytes_do_not_reach_a_terminal() -> None:
    raw = b"a\x07\x08\x0e\tb\n"
    assert lines.presentable(raw, True) == b"a\tb\n"
    assert lines.presentable(raw, False) == raw


def test_every_line_gets_the_prefix_empty_ones_too() -> None:
    assert lines.prefixed(b"a\n\nb\n", b"[0] ") == b"[0] a\n[0] \n[0] b\n"
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


def test_a_prompt_is_shown_once_it_has_stood_for_a_moment() -> None:
    held, shown = lines.feed(Held(), b"so far\n(Pdb) ", 1.0, eager=True)
    assert shown == b"so far\n"
    due = lines.due_at(held)
    assert due == 1.0 + lines.PROMPT_AFTER_S
    assert lines.update(held, 1.0) == (held, b"")
    held, shown = lines.update(held, due)
    assert (held.text, shown) == (b"", b"(Pdb) \n")
    assert lines.feed(held, b"42\n", 5.0, eager=True)[1] == b"42\n"


def test_unfinished_text_is_no_prompt_where_several_ranks_speak() -> None:
    held, shown = lines.feed(Held(), b"half a line", 1.0)
    assert (shown, lines.due_at(held)) == (b"", None)
