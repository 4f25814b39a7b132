"""Find jobs that wait for nodes at the same service and may be parts of one job.

Nodes of one job find each other by the ID of the run. Without --rdzv-id its default is the name of the script. If two
nodes start scripts of different names, or if one of them has another ID, two jobs wait for each other's node.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

from rendezvous.values.late_dataclass import dataclass

_SIMILAR = 0.6
_NAMED = 3
_LIMIT = 50  # of waiting jobs: to compare more costs too much, and a busy service always has some


@dataclass(frozen=True, slots=True)
class WaitingJob:
    job_id: str
    min_nodes: int
    max_nodes: int


def hints(waiting: Sequence[WaitingJob]) -> dict[str, str]:
    """A message for each job whose missing nodes may wait in another one.

    Both jobs have the same number of nodes. Their IDs are similar, or no third job waits.
    """
    if len(waiting) > _LIMIT:
        return {}
    found: dict[str, str] = {}
    for mine in waiting:
        others = [other for other in waiting if other is not mine and _may_be_one(mine, other, len(waiting))]
        if others:
            found[mine.job_id] = _text(mine, others)
    return found


def _may_be_one(mine: WaitingJob, other: WaitingJob, how_many: int) -> bool:
    if (mine.min_nodes, mine.max_nodes) != (other.min_nodes, other.max_nodes):
        return False
    return how_many == 2 or SequenceMatcher(None, mine.job_id, other.job_id).ratio() >= _SIMILAR


def _text(mine: WaitingJob, others: Sequence[WaitingJob]) -> str:
    names = ", ".join(other.job_id for other in others[:_NAMED])
    jobs, wait = ("job", "waits") if len(others) == 1 else ("jobs", "wait")
    return (
        f"this node waits in job {mine.job_id}, and {jobs} {names} also {wait} for nodes here. "
        "If they are parts of one job, start all nodes with the same --rdzv-id (default: the name of the script)."
    )
