"""A finished job as ddpctl sees it: it has what an open job has, and its answers come from files."""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import replace

from ddp_launch_wings.history import story_file
from ddp_launch_wings.history.story_file import Measured, Story
from launcher.answers.log_reading import read_logs
from launcher.output.log_file import Kept, LogHistory, RankLog, StreamKey
from rendezvous.service.owner import OpenJob
from rendezvous.values.events import Event
from rendezvous.values.frozen_map import EMPTY
from rendezvous.values.job_state import JobState, Phase
from rendezvous.values.questions import CannotAnswer, LoggedSeen, LoggedWanted, LogsWanted, Told, Wanted
from rendezvous.values.types import Outcome

_STREAM = re.compile(r"generation_(\d{1,9})/rank_(\d{1,9})/(stdout|stderr)\.log", re.ASCII)
_KILLED = 137  # the exit code that a shell reports for a killed command


def finished_jobs(folder: str, log_dir: str = "") -> list[FinishedJob]:
    """The jobs of this user, the last one first, without those whose agents still run."""
    found = story_file.stories(story_file.folder_of(folder), log_dir)
    return [FinishedJob(story) for story in found if _has_ended(story)]


def _has_ended(story: Story) -> bool:
    return story.past.ended_at > 0 or not story_file.is_running(story)


class _Owner:
    def __init__(self, state: JobState) -> None:
        self.state = state


class Files:
    """Answers for an agent that is gone."""

    def __init__(self, folder: str, measured: Measured = story_file.NOTHING) -> None:
        self._folder, self._measured = folder, measured

    async def ask(self, wanted: Wanted, wait_s: float) -> Told:
        del wait_s
        if isinstance(wanted, LoggedWanted):
            seen = self._measured[wanted.of_node]
            return LoggedSeen(seen.points[wanted.after :], seen.last)
        if not isinstance(wanted, LogsWanted):
            return CannotAnswer("the job has ended")
        return await asyncio.to_thread(self._read, wanted)

    def _read(self, wanted: LogsWanted) -> Told:
        known = _logs_in(self._folder) if self._folder else {}
        if not known:
            where = f"its output is not in {self._folder} now" if self._folder else "its output was not kept"
            return CannotAnswer(f"the job has ended, and {where}")
        return replace(read_logs(wanted, known, story_file.now()), ended=True)


class FinishedJob(OpenJob):
    def __init__(self, story: Story) -> None:
        super().__init__(story.label.job_id, lambda _kind: None)
        self.recall(story.past)
        state = replace(story.state, leases=EMPTY)
        if state.outcome is None:
            reason = f"its launcher on {story.label.host} ended without a report: it was killed, or the machine stopped"
            state = replace(state, phase=Phase.ENDED, outcome=Outcome(False, reason, _KILLED))
            self.ended_at = self.ended_at or max((note.at for note in self.notes), default=self.began_at)
        self.owner = _Owner(state)  # type: ignore[assignment]
        placements = state.world.placements if state.world is not None else ()
        first, other = Files(story.label.logs, story.measured), Files(story.label.logs)
        self.conversations = {place.agent: other if at else first for at, place in enumerate(placements)}
        self.streams: dict[object, object] = {}

    def heard(self, now: float) -> dict[str, float]:
        return {}

    async def execute(self, order: Event) -> JobState:
        """An order to a job that has ended changes nothing."""
        del order
        return self.state


# --- the output -------------------------------------------------------------------------------------


class _OfFile(LogHistory):
    """What is known of a file of another process: its size, and when it was written last."""

    def __init__(self, path: str) -> None:
        super().__init__()
        earlier = _size(f"{path}.1")
        size = _size(path)
        written_at = os.stat(path).st_mtime
        self._all = Kept(0, earlier, earlier + size, is_closed=True, marks=((written_at, 0),))

    def kept(self) -> Kept:
        return self._all


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _logs_in(folder: str) -> dict[StreamKey, RankLog]:
    """A rank that has kept its process has a link to the folder of its start, which is not followed."""
    found = {}
    for path, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name.startswith(("generation_", "rank_"))]
        for name in names:
            whole = os.path.join(path, name)
            match = _STREAM.fullmatch(os.path.relpath(whole, folder))
            if match:
                key = (int(match[1]), int(match[2]), match[3])
                found[key] = RankLog(whole, _OfFile(whole))
    return found
