"""Nodes of one job that wait in two jobs."""

import pytest

from rendezvous.service.waiting_jobs import WaitingJob, hints


@pytest.mark.parametrize(
    ("jobs", "hinted"),
    [
        ((), ()),
        ((("train", 2, 2),), ()),
        ((("train", 2, 2), ("eval", 2, 2)), ("train", "eval")),  # nobody else waits
        ((("train", 2, 2), ("eval", 2, 3)), ()),  # jobs of other sizes are not one job
        ((("train", 2, 2), ("train-v2", 2, 2), ("eval", 2, 2)), ("train", "train-v2")),
        ((("train", 2, 2), ("eval", 2, 2), ("tokenize", 2, 2)), ()),
    ],
)
def test_which_jobs_are_mentioned(jobs: tuple[tuple[str, int, int], ...], hinted: tuple[str, ...]) -> None:
    assert tuple(hints([WaitingJob(*job) for job in jobs])) == hinted


def test_a_hint_names_both_jobs_and_the_option() -> None:
    found = hints([WaitingJob(f"train-{n}", 2, 2) for n in range(9)])
    assert len(found) == 9
    assert all(name in found["train-8"] for name in ("train-8", "train-0", "--rdzv-id"))
    assert "train-5" not in found["train-8"]  # a few are enough


def test_a_busy_service_compares_nothing() -> None:
    assert hints([WaitingJob(f"train-{n}", 2, 2) for n in range(5000)]) == {}
