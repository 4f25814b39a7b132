"""What a pipe gets of a stream: its bytes, in whole lines where that is possible."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from launcher.output import plain_view
from launcher.output.plain_view import HELD_LIMIT, PlainView


@given(st.lists(st.binary(max_size=40), max_size=20), st.booleans())
def test_every_byte_passes_in_its_order(chunks: list[bytes], shows_prompts: bool) -> None:
    view, shown = PlainView(shows_prompts), b""
    for now, chunk in enumerate(chunks):
        view, more = plain_view.feed(view, chunk, now)
        view, late = plain_view.update(view, now + 0.5)
        shown += more + late
    assert shown + view.held == b"".join(chunks)


def test_a_line_is_shown_when_it_ends() -> None:
    view, shown = plain_view.feed(PlainView(), b"one\ntw", 0.0)
    assert (shown, view.due_at) == (b"one\n", None)
    assert plain_view.feed(view, b"o\n", 9.0) == (PlainView(), b"two\n")


def test_a_long_line_is_shown_in_parts() -> None:
    view, shown = plain_view.feed(PlainView(), b"x" * HELD_LIMIT, 0.0)
    assert shown == b""
    assert plain_view.feed(view, b"x", 0.0) == (PlainView(), b"x" * (HELD_LIMIT + 1))


def test_a_bar_is_shown_as_it_is_once_a_second() -> None:
    view, _ = plain_view.feed(PlainView(), b"\r10%", 0.0)
    view, shown = plain_view.feed(view, b"\r20%", 0.9)
    assert (shown, view.due_at) == (b"", 1.0)
    assert plain_view.update(view, 0.9) == (view, b"")
    view, shown = plain_view.update(view, 1.0)
    assert shown == b"\r10%\r20%"
    assert plain_view.feed(view, b"\r100%\n", 1.1) == (PlainView(), b"\r100%\n")


def test_a_simple_terminal_shows_a_prompt() -> None:
    view, shown = plain_view.feed(PlainView(shows_prompts=True), b"so far\n(Pdb) ", 0.0)
    assert shown == b"so far\n"
    assert view.due_at is not None
    assert plain_view.update(view, view.due_at) == (PlainView(True), b"(Pdb) ")
