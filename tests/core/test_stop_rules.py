"""`--stop-when`: what is a condition, and which output makes it true."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from job_story import running, spec

from launcher.health.stop_watch import LineRules
from launcher.settings.spec import StopCondition
from launcher.settings.values import BadValue, stop_conditions
from rendezvous.values.job_state import Phase


def test_conditions_are_separated_by_semicolons() -> None:
    nan, line = stop_conditions("loss is nan ;output matches ^diverged: (a|b)")
    assert nan.text == "loss is nan"
    assert line == StopCondition("output matches ^diverged: (a|b)", "^diverged: (a|b)")


@pytest.mark.parametrize(
    "text", ["", ";", "loss", "loss > 3", "output matches (", "throughput < 50% for 10m", "is nan"]
)
def test_what_is_no_condition_is_refused(text: str) -> None:
    with pytest.raises(BadValue):
        stop_conditions(text)


@pytest.mark.parametrize(
    "line",
    [
        "loss: nan",
        "step 12 | train_loss=nan | lr 0.1",
        "{'loss': nan, 'grad_norm': 3.2}",
        '{"loss": NaN}',
        "Loss nan",
        "loss tensor(nan, device='cuda:0')",
        "epoch 3:  40%|####  | 4/10 [00:01<00:02, loss=nan]",
        "loss: -nan",
        "loss: \x1b[31mnan\x1b[0m",
    ],
)
def test_a_loss_that_is_no_number(line: str) -> None:
    met, rest = LineRules(stop_conditions("loss is nan")).scan(b"", f"before\n{line}\nafter\n".encode())
    assert met is not None
    assert rest == b""
    assert met.condition == "loss is nan"
    assert "before" not in met.because


@pytest.mark.parametrize(
    "line",
    [
        "loss: 0.3",
        "loss: nanoseconds",
        "gloss: nan",
        "accuracy: nan",
        "best loss: inf",
        "the loss\nnan",
        "floss=nan",
    ],
)
def test_what_is_a_number_or_another_one(line: str) -> None:
    assert LineRules(stop_conditions("loss is nan")).scan(b"", line.encode() + b"\n")[0] is None


def test_a_name_of_several_words() -> None:
    rules = LineRules(stop_conditions("grad norm is nan"))
    assert rules.scan(b"", b"grad_norm: nan\n")[0] is not None
    assert rules.scan(b"", b"grad: nan\n")[0] is None


@given(st.lists(st.integers(0, 40), max_size=8), st.sampled_from([b"\n", b"\r", b"\r\n"]))
def test_it_does_not_matter_how_output_is_cut(cuts: list[int], end: bytes) -> None:
    rules, output = (
        LineRules(stop_conditions("loss is nan")),
        b"step 1" + end + b"loss: nan, lr 3" + end + b"loss: na",
    )
    rest, found = b"", []
    edges = [0, *sorted(cuts), len(output)]
    for start, stop in pairwise(edges):
        met, rest = rules.scan(rest, output[start:stop])
        found += [met] if met else []
    assert [met.because for met in found] == ["'loss: nan, lr 3'"]
    assert rest == b"loss: na"


def test_a_line_without_an_end_is_not_kept_for_ever() -> None:
    rules, rest = LineRules(stop_conditions("loss is nan")), b""
    for _ in range(100):
        _, rest = rules.scan(rest, b"x" * 1000)
        assert len(rest) <= 5096


def test_the_job_ends_whatever_the_policy_says() -> None:
    story = running(spec(1, restarts=5), "a").fails("a", 1, final=True, exit_code=123)
    story.stop("a")
    assert story.state.phase is Phase.ENDED
    assert story.state.outcome is not None
    assert (story.state.outcome.exit_code, story.state.outcome.restarts) == (123, 0)
    assert "would not help" in story.state.outcome.reason
