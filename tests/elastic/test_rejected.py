"""A commit that the script rejects is skipped once, with all that was made from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ddp import elastic

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Generations:
    """States of one job in one process: each begins after the process of the one before has died."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last: elastic.State | None = None

    def begins(self) -> tuple[elastic.State, int | None]:
        if self._last is not None:
            self._last.flush()
            self._last._keeper = None
            self._last._forget_leaving()
        self._last = elastic.State(x=0.0, folder=self._folder, disk_every=1, keep=9)
        found = self._last.resume()
        return self._last, None if found is None else found.number

    def close(self) -> None:
        if self._last is not None:
            self._last.close()


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Generations]:
    (tmp_path / "scratch").mkdir(mode=0o700)
    monkeypatch.setenv("DDP_SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    found = Generations(tmp_path / "commits")
    yield found
    found.close()


def commit(state: elastic.State, times: int, value: float) -> None:
    for _ in range(times):
        state.x = value
        state.commit()


def test_the_commit_and_those_made_from_it_are_skipped_once(
    job: Generations, caplog: pytest.LogCaptureFixture
) -> None:
    state, _ = job.begins()
    commit(state, 3, 1.0)
    state.x = float("nan")
    state.commit()
    state, number = job.begins()
    assert number == 4
    commit(state, 3, float("nan"))
    with pytest.raises(elastic.CommitRejected, match="The next start skips commit 4"):
        state.reject("loss is nan")
    state, number = job.begins()
    assert (number, state.x) == (3, 1.0)
    assert "skipped commit 4 and those made from it, because it was rejected: loss is nan" in caplog.text
    commit(state, 1, 2.0)  # number 4 again, of another lineage
    state, number = job.begins()
    assert (number, state.x) == (4, 2.0)
    with pytest.raises(
        elastic.CommitRejected, match="No commit is skipped, because commit 4 was skipped before"
    ):
        state.reject("loss is nan")
    assert job.begins()[1] == 4


def test_a_job_that_has_nothing_older_keeps_what_it_has(
    job: Generations, caplog: pytest.LogCaptureFixture
) -> None:
    state, _ = job.begins()
    with pytest.raises(elastic.CommitRejected, match="has not resumed from a commit"):
        state.reject("loss is nan")
    commit(state, 1, 1.0)
    state, number = job.begins()
    with pytest.raises(elastic.CommitRejected):
        state.reject("loss is nan")
    assert job.begins()[1] == number == 1
    assert "there is no older one" in caplog.text
