"""What the tables say about lines of real logs: never a wrong class, and nothing where a line shows no cause."""

from __future__ import annotations

import pytest
from public_logs import DEVELOPED, HELD_OUT, Line

from launcher.failure.crash_text import Raised
from launcher.failure.symptoms import class_of, is_known, may_be_at_peer

_MIN_HELD_OUT_KNOWN = 0.6  # a table that knows nothing is never wrong


def judged(text: str) -> tuple[str, bool]:
    """The class, and whether the fault may be at either end; "" for a line that the tables do not know."""
    raised = Raised("torch.distributed.DistBackendError", text)
    return (str(class_of(raised)), may_be_at_peer(raised)) if is_known(raised) else ("", False)


def name(line: Line) -> str:
    return f"{line.thread} {line.text[-40:]}"


@pytest.mark.parametrize("line", DEVELOPED, ids=name)
def test_each_line_at_hand_is_judged_as_its_thread_confirms(line: Line) -> None:
    assert judged(line.text) == (line.says, line.between)


@pytest.mark.parametrize("line", HELD_OUT, ids=name)
def test_no_line_that_was_held_out_is_judged_wrong(line: Line) -> None:
    assert judged(line.text) in ((line.says, line.between), ("", False))


def test_most_lines_that_were_held_out_are_known() -> None:
    with_cause = [line for line in HELD_OUT if line.says]
    known = [line for line in with_cause if judged(line.text)[0]]
    assert len(known) >= _MIN_HELD_OUT_KNOWN * len(with_cause), [
        name(each) for each in with_cause if each not in known
    ]
