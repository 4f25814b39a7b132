"""Commands of ddpctl that make ranks do something: `checkpoint`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from rendezvous.control.asking import inquire, job_named
from rendezvous.control.formats import is_for_programs, show, warn
from rendezvous.values.questions import CannotAnswer, Checkpointed, CheckpointWanted

if TYPE_CHECKING:
    import argparse

    from rendezvous.control.service import Service

_MORE_S = 5.0  # than the agent waits


async def checkpoint(service: Service, arguments: argparse.Namespace) -> int:
    job = await job_named(service, arguments.job)
    wanted = CheckpointWanted(arguments.reason or "requested with ddpctl", arguments.wait)
    answers = await inquire(service, job, wanted, wait_s=arguments.wait + _MORE_S)
    missing = 0
    found = []
    for node, told in answers:
        if isinstance(told, Checkpointed) and told.taken:
            found.append({"node": node, **asdict(told)})
            continue
        missing += 1
        late = f"not all ranks have taken the checkpoint within {arguments.wait:g} s"
        warn(f"node {node}: {told.reason if isinstance(told, CannotAnswer) else late}")
    if is_for_programs(arguments.output):
        show({"job_id": job, "taken": not missing, "nodes": found}, arguments.output)
    elif not missing:
        slowest = max((each["took_s"] for each in found), default=0.0)
        show(f"job {job}: all ranks have taken a checkpoint, after {slowest:.1f} s", arguments.output)
    return 1 if missing else 0
