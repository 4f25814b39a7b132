"""The files of finished jobs: bounded, whole or absent, and nobody else's."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ddp_launch_wings.history import story_file
from ddp_launch_wings.history.finished import Files, FinishedJob, finished_jobs
from ddp_launch_wings.history.story_file import Label
from rendezvous.rounds.event_log import LoggedEvent, Past, TimePoint
from rendezvous.values.job_state import JobState, Phase
from rendezvous.values.questions import LoggedPoint, LoggedSeen, LoggedWanted
from rendezvous.values.rank_time import JobTime, TimeSpent
from rendezvous.values.types import JobSpec, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

ENDED = JobState(spec=JobSpec("job"), phase=Phase.ENDED, outcome=Outcome(True, "all ranks finished", 0))
ME = story_file.process_of(os.getpid())
LABEL = Label("job", os.uname().nodename, os.getpid(), ME, "")
NOTES = (LoggedEvent(1, 1000.0, 1, "joined", "n", "n joined"),)
POINTS = (TimePoint(1005.0, 1, 9.0, JobTime(2, TimeSpent(forward=9.5))),)  # for the charts of the page
PAST = Past(1000.0, 1060.0, "journal", NOTES, points=POINTS)


def keep(folder: Path, label: Label = LABEL, past: Past = PAST, state: JobState = ENDED) -> str:
    path = os.path.join(folder, story_file.name_of(label, past.began_at))
    story_file.write(path, story_file.encoded(label, state, past))
    return path


def found(folder: Path, log_dir: str = "") -> list[FinishedJob]:
    return finished_jobs(str(folder), log_dir)


@pytest.mark.parametrize("job_id", ["job", "a b", "täg/lich", "..", "x" * 128, "\u202e'$(id)"])
def test_a_job_is_read_as_it_was_written_whatever_its_name(job_id: str, tmp_path: Path) -> None:
    keep(tmp_path, replace(LABEL, job_id=job_id))
    (job,) = found(tmp_path)
    assert (job.job_id, job.state.outcome, job.past()) == (job_id, ENDED.outcome, PAST)


def test_what_was_measured_is_read_as_it_was_written_and_thinned_if_it_is_long(tmp_path: Path) -> None:
    def kept(points: Iterable[LoggedPoint]) -> tuple[LoggedPoint, ...]:
        seen = LoggedSeen(tuple(replace(point, number=n) for n, point in enumerate(points, 1)), 0)
        measured = (seen, LoggedSeen((), 0))
        story_file.write(str(tmp_path / "a.story"), story_file.encoded(LABEL, ENDED, PAST, measured))
        story = story_file.read(str(tmp_path / "a.story"))
        assert story is not None
        assert story.past == PAST
        told = asyncio.run(Files("", story.measured).ask(LoggedWanted(), 1.0))
        assert isinstance(told, LoggedSeen)
        assert told.last == len(told.points)
        return told.points

    few = (LoggedPoint(1, "loss", 3, "0.25", 1, 7.5), LoggedPoint(2, "lr", 5, "nan", 2, 8.5))
    assert kept(few) == few
    noise = (f"{math.sin(step) ** 9:.12g}" for step in range(30_000))
    many = kept(
        LoggedPoint(0, name, n, text, 1, 7.5) for n, text in enumerate(noise) for name in ("loss", "lr")
    )
    assert os.path.getsize(tmp_path / "a.story") < 400_000
    steps = [point.step for point in many if point.name == "lr"]
    assert 2_000 < len(steps) == len(many) / 2
    assert steps[-1] == 29_999


def test_of_300_jobs_the_latest_stay_and_with_the_others_goes_their_output(tmp_path: Path) -> None:
    paths = [keep(tmp_path, past=replace(PAST, began_at=float(i), ended_at=i + 1.0)) for i in range(300)]
    for i, path in enumerate(paths):
        os.utime(path, (1e6 + i, 1e6 + i))
        os.mkdir(story_file.output_of(path))
    (tmp_path / "mine.txt").write_text("of somebody else")
    story_file.prune(str(tmp_path), 100, 1e6 + 300)
    assert [job.began_at for job in found(tmp_path)] == [float(i) for i in reversed(range(200, 300))]
    assert len(os.listdir(tmp_path)) == 201
    story_file.prune(str(tmp_path), 100, 1e6 + 250 + story_file.MOST_DAYS * 86_400.0)
    assert [job.began_at for job in found(tmp_path)] == [float(i) for i in reversed(range(250, 300))]


def test_a_file_that_is_damaged_or_cut_hides_no_other(tmp_path: Path) -> None:
    with open(keep(tmp_path), "rb") as file:
        whole = file.read()
    for i, data in enumerate([b"", whole[:40], whole[:200], b"x" + whole, whole.replace(b'"pid"', b'"pit"')]):
        (tmp_path / f"{i}.story").write_bytes(data)
    (tmp_path / "a-folder.story").mkdir()
    assert [job.job_id for job in found(tmp_path)] == ["job"]


def test_a_folder_that_others_can_write_to_is_not_read(tmp_path: Path) -> None:
    keep(tmp_path)
    os.chmod(tmp_path, 0o777)
    assert found(tmp_path) == []
    os.chmod(tmp_path, 0o700)
    assert len(found(tmp_path)) == 1


def test_nothing_is_written_if_little_space_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(story_file, "_ROOM", shutil.disk_usage(tmp_path).total + 1)
    keep(tmp_path)
    assert os.listdir(tmp_path) == []


def test_without_an_end_a_job_has_ended_only_if_its_agent_is_gone(tmp_path: Path) -> None:
    running = JobState(spec=JobSpec("job"), phase=Phase.RUNNING, generation=2)
    open_past = replace(PAST, ended_at=0.0)
    keep(tmp_path, past=open_past, state=running)
    assert found(tmp_path) == []
    keep(tmp_path, replace(LABEL, job_id="gone", process="another with this number"), open_past, running)
    (job,) = found(tmp_path)
    assert (job.job_id, job.state.phase, job.ended_at) == ("gone", Phase.ENDED, 1000.0)
    assert job.state.outcome is not None
    assert "ended without a report" in job.state.outcome.reason


def test_it_is_found_beside_the_logs_too_and_once(tmp_path: Path) -> None:
    logs = tmp_path / "logs" / "job"
    logs.mkdir(parents=True)
    story_file.write(str(logs / story_file.IN_LOGS), story_file.encoded(LABEL, ENDED, PAST))
    for log_dir in (tmp_path / "logs", logs):
        assert [job.job_id for job in finished_jobs("none", str(log_dir))] == ["job"]
    keep(tmp_path)
    assert len(found(tmp_path, str(logs))) == 1
