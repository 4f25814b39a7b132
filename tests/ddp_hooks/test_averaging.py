"""LocalSGD and DiLoCo beside the loops that somebody would write by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import averaging_trials as trials
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp.averaging import LocalSGD, is_due, is_local

if TYPE_CHECKING:
    from collections.abc import Callable

    from crew import Crew

    CrewOf = Callable[..., Crew]

KINDS = ["local", "diloco"]
# Warm-up steps, then three steps alone each time.
ALIKE = [True, True, False, False, True, False, False, True, False, False, True]


@pytest.mark.parametrize(
    ("which", "backend", "size"),
    [
        ("ours", "gloo", 3),
        ("torch", "gloo", 3),
        pytest.param("ours", "shm", 4, marks=pytest.mark.nightly),
        pytest.param("ours", "hier", 2, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_like_the_loop_by_hand(crew_of: CrewOf, kind: str, which: str, backend: str, size: int) -> None:
    for parameters, buffers, alike in crew_of(backend, size).run(trials.like_the_loop, kind, which):
        assert max(parameters, buffers) < 1e-5
        assert alike == ALIKE


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_wrapper(crew_of: CrewOf, kind: str) -> None:
    for parameters, buffers, _ in crew_of("gloo", 3).run(trials.like_the_loop, kind, "none", 7, 2, 0):
        assert max(parameters, buffers) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_state_goes_on_as_before(crew_of: CrewOf, kind: str) -> None:
    assert crew_of("gloo", 3).run(trials.goes_on_as_before, kind) == [(12, 0.0)] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_meeting_when_asked(crew_of: CrewOf, kind: str) -> None:
    assert crew_of("gloo", 3).run(trials.now, kind) == [(False, True, 3)] * 3


def test_a_state_of_another_model_is_refused(crew_of: CrewOf) -> None:
    with pytest.raises(AssertionError, match=r"WrongValue.*'0\.bias'"):
        crew_of("gloo", 2).run(trials.of_another_model)


@given(st.integers(1, 9), st.integers(0, 20), st.integers(1, 60))
def test_ranks_meet_in_time(every: int, warmup: int, steps: int) -> None:
    meetings = [done for done in range(1, steps + 1) if is_due(done, every, warmup)]
    assert meetings == list(range(warmup + every, steps + 1, every))
    assert all(is_local(done - 1, warmup) for done in meetings)


@pytest.mark.parametrize(("every", "warmup", "named"), [(0, 0, "every=0"), (3, -1, "warmup=-1")])
def test_settings_that_cannot_work(every: int, warmup: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        LocalSGD(torch.nn.Linear(1, 1), every, warmup)
