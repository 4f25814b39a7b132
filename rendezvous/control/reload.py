"""`ddpctl reload`: order a reload, and tell whether the edited script has made its first steps or was rolled back."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from rendezvous.control.asking import inquire, job_named
from rendezvous.control.formats import is_for_programs, show, warn
from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.values.questions import RanksSeen, RanksWanted

if TYPE_CHECKING:
    import argparse

    from rendezvous.control.service import Service

_BEFORE_S = 45.0  # besides the wait for the checkpoint: for compiling on all nodes
_LOOK_AGAIN_S = 0.2
_NO_CHECKPOINT = "they go on from their last commit or file (no rank asks for checkpoint requests)"


async def run(service: Service, arguments: argparse.Namespace) -> int:
    name = await job_named(service, arguments.job)
    request = pb.ReloadJobRequest(
        job_id=name, reason=arguments.reason, steps=arguments.steps, wait_s=arguments.wait
    )
    response = await service.call("ReloadJob", request, longer_s=arguments.wait + _BEFORE_S)
    is_text = not is_for_programs(arguments.output)
    if is_text:
        show(_ordered_text(name, response), arguments.output)
    if not response.kept and arguments.steps:
        warn("not all agents have the files from before, so there is no rollback if the edited script fails")
    job, steps = await _followed(service, name, response.job, arguments.wait)
    failed = job.summary.rollbacks > response.job.rollbacks
    ended = job.summary.phase == pb.PHASE_ENDED and not job.summary.succeeded
    if is_text:
        show(_outcome_text(job, steps, failed), arguments.output)
    else:
        found = {"job_id": name, "changed": list(response.changed), "checkpoint": response.checkpoint}
        reason = _rollback_reason(job) if failed else job.summary.reason
        show(found | {"rolled_back": failed, "steps": steps, "reason": reason}, arguments.output)
    return 1 if failed or ended else 0


def _ordered_text(name: str, response: Any) -> str:
    changed = ", ".join(response.changed) or "no file"
    state = "all ranks have taken a checkpoint" if response.checkpoint else _NO_CHECKPOINT
    return f"job {name}: changed: {changed}; {state}; restarting with the edited script"


async def _followed(service: Service, name: str, at_order: Any, wait_s: float) -> tuple[Any, int | None]:
    """The job when the reload has succeeded or failed, or the time is over; and the step of the last rank."""
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + wait_s
    while True:
        job = (await service.call("GetJob", pb.GetJobRequest(job_id=name))).job
        now = job.summary
        is_running = now.phase == pb.PHASE_RUNNING and now.generation > at_order.generation
        over = (
            now.phase == pb.PHASE_ENDED
            or now.rollbacks > at_order.rollbacks
            or now.reloads > at_order.reloads
        )
        steps = await _steps(service, name, now.generation) if is_running and not over else None
        if over or (steps is not None and steps >= max(1, now.trial_until)) or loop.time() >= give_up_at:
            return job, steps
        await asyncio.sleep(_LOOK_AGAIN_S)


async def _steps(service: Service, name: str, generation: int) -> int | None:
    """The lowest step of all ranks of this generation; None if some are not known."""
    told = [each for _node, each in await inquire(service, name, RanksWanted())]
    if not all(isinstance(each, RanksSeen) and each.generation == generation for each in told):
        return None
    ranks = [rank for each in told if isinstance(each, RanksSeen) for rank in each.ranks]
    return min((rank.step for rank in ranks), default=None) if all(rank.known for rank in ranks) else None


def _outcome_text(job: Any, steps: int | None, failed: bool) -> str:
    now, name = job.summary, job.summary.job_id
    if failed:
        return f"job {name}: rolled back: {_rollback_reason(job)}"
    if now.phase == pb.PHASE_ENDED:
        return f"job {name} has ended: {now.reason}"
    if steps is not None and steps >= max(1, now.trial_until):
        return f"job {name}: the edited script runs in generation {now.generation}, and has finished step {steps}"
    so_far = "no step" if not steps else f"step {steps}"
    return (
        f"job {name}: the edited script has finished {so_far} so far (--wait); if it fails before step "
        f"{now.trial_until}, the earlier files are taken again: `ddpctl why {name}`"
    )


def _rollback_reason(job: Any) -> str:
    undone = [each.reason for each in job.decisions if each.sources == pb.SOURCE_CHANGE_ROLLBACK]
    return str(undone[-1]) if undone else "see `ddpctl events`"
