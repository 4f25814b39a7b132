"""Commands of ddpctl that make ranks do something: `checkpoint` and `profile`."""

from __future__ import annotations

import os
import re
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

from rendezvous.control.asking import inquire, job_named
from rendezvous.control.formats import is_for_programs, show, warn
from rendezvous.values.error_codes import Code
from rendezvous.values.questions import (
    CannotAnswer,
    Checkpointed,
    CheckpointWanted,
    ProfileWanted,
    TracePart,
    TraceWanted,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from io import BufferedWriter

    from rendezvous.control.service import Service
    from rendezvous.values.questions import FromConversation, Wanted

_MORE_S = 5.0  # than the agent waits
_PROFILE_MORE_S = 70.0  # for the step that the rank is in, and for writing the file


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
        reason = told.reason if isinstance(told, CannotAnswer) else late
        warn(f"node {node}: {reason}", Code.NOT_POSSIBLE_NOW)
    if is_for_programs(arguments.output):
        show({"job_id": job, "taken": not missing, "nodes": found}, arguments.output)
    elif not missing:
        slowest = max((each["took_s"] for each in found), default=0.0)
        show(f"job {job}: all ranks have taken a checkpoint, after {slowest:.1f} s", arguments.output)
    return 1 if missing else 0


@contextmanager
def _unfinished(path: str) -> Iterator[BufferedWriter]:
    """A file beside `path`, which is removed unless it is renamed."""
    partial = f"{path}.part"
    try:
        with open(partial, "wb") as file:
            yield file
    finally:
        with suppress(FileNotFoundError):
            os.unlink(partial)


async def profile(service: Service, arguments: argparse.Namespace) -> int:
    job, rank = await job_named(service, arguments.job), arguments.rank
    path = arguments.out or f"{re.sub(r'[^A-Za-z0-9._-]', '_', job)}-rank{rank}.trace.json.gz"
    with _unfinished(path) as file:  # before the rank is asked: the folder may not be writable
        wait_s = arguments.seconds + _PROFILE_MORE_S
        told = await _only_answer(service, job, rank, ProfileWanted(rank, arguments.seconds), wait_s)
        while isinstance(told, TracePart):
            file.write(told.data)
            if file.tell() >= told.size or not told.data:
                file.flush()
                os.replace(file.name, path)
                break
            told = await _only_answer(service, job, rank, TraceWanted(rank, told.name, file.tell()), _MORE_S)
    if not isinstance(told, TracePart):
        other = "the agent gave an answer to another question"
        warn(told.reason if isinstance(told, CannotAnswer) else other, Code.NOT_POSSIBLE_NOW)
        return 1
    if is_for_programs(arguments.output):
        show(
            {"job_id": job, "rank": rank, "file": path, "bytes": told.size, "steps": told.steps},
            arguments.output,
        )
    else:
        size = f"{told.steps} steps, {told.size / 1e6:.1f} MB"
        show(f"rank {rank}: {path} ({size}); open it at https://ui.perfetto.dev", arguments.output)
    return 0


async def _only_answer(
    service: Service, job: str, rank: int, wanted: Wanted, wait_s: float
) -> FromConversation:
    ((_, told),) = await inquire(service, job, wanted, ranks=[rank], wait_s=wait_s)
    return told
