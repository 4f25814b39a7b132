"""What the house uses of the history: an agent keeps its job, and ddpctl finds the jobs that were kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddp_launch_wings.history.finished import FinishedJob
    from ddp_launch_wings.history.keeping import HistoryWriter
    from rendezvous.service.owner import OpenJob
    from rendezvous.values.questions import LogsWanted, Told


def keeper(job: OpenJob, folder: str, most: int, logs: str, *, is_temporary: bool) -> HistoryWriter:
    """`folder`: as --history-dir names it; "" for the folder of this user."""
    from ddp_launch_wings.history.keeping import HistoryWriter
    from ddp_launch_wings.history.story_file import folder_of

    chosen = folder_of(folder) if most else ""
    return HistoryWriter(job, chosen, most, logs, is_temporary=is_temporary)


async def logs_in(folder: str, wanted: LogsWanted) -> Told:
    from ddp_launch_wings.history import finished

    return await finished.Files(folder).ask(wanted, 0.0)


def finished_jobs(folder: str, log_dir: str) -> list[FinishedJob]:
    """`folder`: as for `keeper`."""
    from ddp_launch_wings.history import finished

    return finished.finished_jobs(folder, log_dir)
