"""What the page gets to know of a job and its ranks, as JSON. Pure, but for protobuf messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rendezvous.codec import decode
from rendezvous.control.ctl_text import phase_of
from rendezvous.control.top_table import phase_text, rows_of
from rendezvous.control.why_text import PARTS
from rendezvous.control.why_text import rows_of as story_rows
from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.values.questions import CannotAnswer, RanksSeen
from rendezvous.values.rank_time import JobTime, in_words
from rendezvous.values.types import Decision, DecisionKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rendezvous.control.top_table import Row, Spent
    from rendezvous.control.why_text import Story
    from rendezvous.values.questions import FromConversation, StepSeen

_LATE_S = 10.0  # a heartbeat
_MIB = 1 << 20
BYTES_OF = {
    **{"float64": 8, "int64": 8, "complex64": 8, "complex128": 16},
    **{"float16": 2, "bfloat16": 2, "int16": 2, "int8": 1, "uint8": 1, "bool": 1},
}  # other types have four


def summary(job: Any) -> dict[str, Any]:
    """A row of the list of jobs."""
    return {
        "job": job.job_id,
        "phase": phase_of(job),
        "generation": job.generation,
        "nodes": job.nodes or job.members,
        "min_nodes": job.min_nodes,
        "max_nodes": job.max_nodes,
        "ranks": job.world_size,
        "restarts": job.restarts,
        "heals": job.heals,
        "reason": job.reason,
    }


def job_view(job: Any) -> dict[str, Any]:
    decisions = [decode(Decision, each) for each in job.decisions]
    view = {
        **summary(job.summary),
        "is_over": job.summary.phase == pb.PHASE_ENDED,
        "where": [_node(node) for node in job.nodes],
        "decisions": [_decision(each) for each in decisions],
        "failures": [_failure(each.generation, each.cause) for each in job.failures],
        "time": "",
    }
    if job.HasField("time"):
        view["time"] = in_words(decode(JobTime, job.time))
    return view


def _node(node: Any) -> dict[str, Any]:
    placed = node.HasField("node_rank")
    return {
        "node": node.node,
        "node_rank": node.node_rank if placed else None,
        "first": node.rank_offset if placed else None,
        "nproc": node.nproc,
        "address": node.address,
        "present": node.present,
        "late_s": round(node.heard_s) if node.heard_s > _LATE_S else 0,
        "excluded": node.excluded,
        "health": list(node.health),
        "block": node.block,
        "hardware": node.hardware,
    }


def _decision(decision: Decision) -> dict[str, Any]:
    return {
        "generation": decision.generation,
        "title": decision.title,
        "reason": decision.reason,
        "is_failure": decision.kind not in (DecisionKind.FINISH, DecisionKind.GROW),
    }


def _failure(generation: int, cause: Any) -> dict[str, Any]:
    return {"generation": generation, "rank": cause.rank, "node": cause.node, "reason": cause.reason}


def note_view(note: Any) -> dict[str, Any]:
    return {
        "seq": note.seq,
        "at": note.at,
        "generation": note.generation,
        "kind": note.kind,
        "node": note.node,
        "text": note.text,
    }


# --- ranks ---------------------------------------------------------------------------------------------------


def rank_rows(
    answers: Iterable[tuple[str, FromConversation]], before: Spent
) -> tuple[list[Row], Spent, list[str]]:
    """The rows by rank, what the next look compares with, and the nodes that did not answer."""
    answers = list(answers)
    seen = [(node, rank) for node, told in answers if isinstance(told, RanksSeen) for rank in told.ranks]
    rows, spent = rows_of(seen, before)
    silent = [f"node {node}: {told.reason}" for node, told in answers if isinstance(told, CannotAnswer)]
    return sorted(rows, key=lambda row: row.seen.rank), spent, silent


ROW = (
    *("rank", "phase", "step", "mean_ms", "share", "memory_mib", "gpu", "gpu_memory_mib", "quiet_s"),
    *("starts", "alive", "known"),
)


def row_view(row: Row) -> list[Any]:
    """The values of `ROW`: a list, because there may be thousands, once a second."""
    seen, gpu = row.seen, row.seen.gpu
    return [
        seen.rank,
        phase_text(seen),
        seen.step,
        round(seen.mean_step_s * 1e3, 2),
        None if row.share is None else round(row.share, 3),
        seen.memory // _MIB,
        None if gpu is None else gpu.utilization,
        None if gpu is None else gpu.memory_used // _MIB,
        round(seen.quiet_s, 1),
        seen.starts,
        int(seen.alive),
        int(seen.known),
    ]


def step_view(step: StepSeen) -> dict[str, Any]:
    return {
        "step": step.step,
        "duration_s": step.duration_s,
        "phases": [[str(each.phase), each.start_s, each.end_s] for each in step.phases],
        "calls": [
            {
                "op": each.op,
                "group": each.group,
                "bytes": each.numel * BYTES_OF.get(each.dtype, 4),
                "dtype": each.dtype,
                "is_async": each.is_async,
                "start_s": each.start_s,
                "end_s": each.end_s,
            }
            for each in sorted(step.calls, key=lambda call: call.start_s)
        ],
    }


# --- the story of a failure ----------------------------------------------------------------------------------


def story_view(story: Story, job: Any) -> dict[str, Any]:
    """The same rows as `ddpctl why`, and the parts of the restart as numbers."""
    times = story.times
    parts = {part: None if times is None else getattr(times, f"{part}_s") for part in PARTS}
    decisions = [_decision(decode(Decision, each)) for each in job.decisions]
    known = [each.generation for each in job.failures]
    known += [each["generation"] for each in decisions if each["is_failure"]]
    return {
        "generation": story.generation,
        "generations": sorted(set(known)),
        "rows": [list(row) for row in story_rows(story) if row[0] != "took"],
        "parts": parts,
        "is_hang": story.cause is not None and str(story.cause.failure) == "hang",
        "traceback": story.cause.traceback if story.cause is not None else "",
    }


def full_row(row: Row) -> dict[str, Any]:
    """Everything that is known of one rank."""
    return {
        "rank": row.seen.rank,
        "node": row.node,
        "pid": row.seen.pid,
        "doing": row.seen.doing,
        "message": row.seen.message,
        "last_step_s": row.seen.last_step_s,
        "phase_s": row.seen.phase_s,
        "step_s": row.seen.step_s,
    }
