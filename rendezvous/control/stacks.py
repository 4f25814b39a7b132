"""`ddpctl stacks`: the stacks of one rank, as they are now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rendezvous.control.asking import inquire, job_named
from rendezvous.control.ctl_text import printable_lines
from rendezvous.control.formats import is_for_programs, show, warn
from rendezvous.values.error_codes import Code
from rendezvous.values.questions import CannotAnswer, Stacks, StacksWanted

if TYPE_CHECKING:
    import argparse

    from rendezvous.control.service import Service

_WAIT_S, _NATIVE_WAIT_S = 8.0, 60.0  # gdb reads the symbols of torch


async def run(service: Service, arguments: argparse.Namespace) -> int:
    job, rank = await job_named(service, arguments.job), arguments.rank
    wait_s = _NATIVE_WAIT_S if arguments.native else _WAIT_S
    wanted = StacksWanted(rank, arguments.native)
    ((node, told),) = await inquire(service, job, wanted, ranks=[rank], wait_s=wait_s)
    if isinstance(told, CannotAnswer):
        warn(f"node {node}: {told.reason}", Code.NOT_POSSIBLE_NOW)
        return 1
    assert isinstance(told, Stacks)
    if is_for_programs(arguments.output):
        show({"job_id": job, "rank": rank, "node": node, "text": told.text}, arguments.output)
    else:
        show(f"rank {rank} on {printable_lines(node)}\n\n{printable_lines(told.text)}", arguments.output)
    return 0
