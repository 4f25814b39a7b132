"""Tracebacks of ranks that end because a peer is gone are left out on the terminal. All other bytes are shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.failure.symptoms import is_consequence
from launcher.output.lines import NO_FOLD, folded

FRAMES = b"""\
[rank2]: Traceback (most recent call last):
[rank2]:   File "train.py", line 8, in <module>
[rank2]:     loss.backward()
[rank2]:     ^^^^^^^^^^^^^^^
"""
LOST = b"""\
[rank2]: RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:5011: Connection reset by peer.
"""
MORE = b"[rank2]: Check the logs of the remote worker.\n[rank2]:\n"
CAUSED = b"\n[rank2]: The above exception was the direct cause of the following exception:\n\n"
OWN = b"[rank2]: ValueError: bad sample\n"


def fed(text: bytes, cuts: list[int]) -> tuple[bytes, bytes]:
    """Whole lines arrive in pieces."""
    lines, fold, shown, left_out = text.splitlines(keepends=True), NO_FOLD, b"", b""
    ends = sorted({min(cut, len(lines)) for cut in cuts} | {len(lines)})
    for begin, end in zip([0, *ends], ends, strict=False):
        fold, more, less = folded(fold, b"".join(lines[begin:end]), is_consequence)
        shown, left_out = shown + more, left_out + less
    return shown + fold[0], left_out


@given(st.lists(st.integers(0, 12)))
def test_a_traceback_about_a_lost_peer_is_left_out_and_the_rest_is_shown(cuts: list[int]) -> None:
    assert fed(b"a\n" + FRAMES + LOST + MORE + b"b\n", cuts) == (b"a\nb\n", FRAMES + LOST + MORE)


@given(st.lists(st.integers(0, 25)))
def test_a_chain_of_them_is_left_out_with_what_joins_it(cuts: list[int]) -> None:
    chain = FRAMES + LOST + CAUSED + FRAMES + LOST + MORE
    assert fed(b"a\n" + chain + b"b\n", cuts) == (b"a\nb\n", chain)
    assert fed(FRAMES + LOST + CAUSED + FRAMES + OWN, cuts) == (CAUSED + FRAMES + OWN, FRAMES + LOST)
    assert fed(FRAMES + LOST + b"\nb\n", cuts) == (b"\nb\n", FRAMES + LOST)


@pytest.mark.parametrize(
    "text",
    [
        FRAMES + OWN,
        (FRAMES + LOST).replace(b"[rank2]: ", b""),  # the script has printed it
        b"[rank2]: a line of the script\n" + FRAMES + b"out of the ordinary\n" + LOST,
        FRAMES,
        LOST + MORE,
    ],
)
@given(cuts=st.lists(st.integers(0, 12)))
def test_other_text_is_shown_byte_for_byte(text: bytes, cuts: list[int]) -> None:
    assert fed(text, cuts) == (text, b"")


def test_of_a_chain_what_the_rank_itself_raised_is_shown() -> None:
    joined = (
        b"[rank2]:\n[rank2]: During handling of the above exception, another exception occurred:\n[rank2]:\n"
    )
    shown, left_out = fed(FRAMES + OWN + joined + FRAMES + LOST, [])
    assert (shown, left_out) == (FRAMES + OWN + joined, FRAMES + LOST)
