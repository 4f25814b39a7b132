"""The commands of ddpctl: each is one call to the replica that owns the job, or several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, assert_never

import grpc
import grpc.aio

from rendezvous.control import acting, logs, reload, stacks, top, why
from rendezvous.control.commands import Command, command_of
from rendezvous.control.ctl_text import event_line, job_table, job_text, named
from rendezvous.control.formats import JSON, as_dict, is_for_programs, show, warn
from rendezvous.control.job_json import job_dict
from rendezvous.pb import rendezvous_pb2 as pb

if TYPE_CHECKING:
    import argparse

    from rendezvous.control.commands import Order
    from rendezvous.control.service import Service


async def carry_out(service: Service, arguments: argparse.Namespace) -> int:
    command, output = command_of(arguments), arguments.output
    for_programs = is_for_programs(output)
    match command:
        case Command.LIST:
            jobs = await service.all_jobs()
            show({"jobs": [as_dict(job) for job in jobs]} if for_programs else job_table(jobs), output)
        case Command.GET:
            job = (await service.call("GetJob", pb.GetJobRequest(job_id=arguments.job))).job
            show(job_dict(job), output if for_programs else JSON)
        case Command.STATUS:
            job = (await service.call("GetJob", pb.GetJobRequest(job_id=arguments.job))).job
            show(job_dict(job) if for_programs else job_text(job), output)
        case Command.EVENTS | Command.WATCH:
            async for note in service.notes(arguments.job, follow=command is Command.WATCH):
                show(as_dict(note) if for_programs else event_line(note), output, compact=True)
        case Command.TOP:
            return await top.run(service, arguments)
        case Command.LOGS:
            return await logs.run(service, arguments)
        case Command.STACKS:
            return await stacks.run(service, arguments)
        case Command.WHY:
            return await why.run(service, arguments)
        case Command.CHECKPOINT:
            return await acting.checkpoint(service, arguments)
        case Command.PROFILE:
            return await acting.profile(service, arguments)
        case Command.RELOAD:
            return await reload.run(service, arguments)
        case Command.DRAIN | Command.RESUME | Command.RESIZE | Command.RESTART | Command.ABORT:
            await _give(service, command, arguments)
        case _:
            assert_never(command)
    return 0


async def _give(service: Service, order: Order, arguments: argparse.Namespace) -> None:
    words = await _warn_not_drained(service, arguments) if order is Command.RESUME else ""
    job = (await service.call(*request_of(order, arguments))).job
    show(as_dict(job) if is_for_programs(arguments.output) else job_table([job]), arguments.output)
    if order is Command.DRAIN:
        words = await _warn_unknown_node(service, arguments)
    if words:
        warn(words)


async def _warn_unknown_node(service: Service, arguments: argparse.Namespace) -> str:
    """Warn if the job has no such node now. The name may be that of a node that joins later, or be misspelt."""
    node, job = arguments.node, arguments.job
    here = [each.node for each in await _nodes_of(job, service) if each.present]
    if node in here:
        return ""
    return (
        f"job {job} has no node {node} now (its nodes: {named(here)}). If a node of that name joins later, it will be "
        f"excluded until `ddpctl resume {job} {node}`."
    )


async def _warn_not_drained(service: Service, arguments: argparse.Namespace) -> str:
    try:
        out = [each.node for each in await _nodes_of(arguments.job, service) if each.excluded]
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.NOT_FOUND:
            raise  # the order would fail in the same way
        return ""  # the order itself reports that the job does not exist
    if arguments.node in out:
        return ""
    problem = f"node {arguments.node} of job {arguments.job} is not drained (drained or excluded nodes: {named(out)})"
    return f"{problem}, so there is nothing to resume"


async def _nodes_of(job: str, service: Service) -> list[Any]:
    return list((await service.call("GetJob", pb.GetJobRequest(job_id=job))).job.nodes)


def request_of(order: Order, arguments: argparse.Namespace) -> tuple[str, Any]:
    """The method of the service, and its request."""
    job = arguments.job
    match order:
        case Command.DRAIN:
            return "DrainNode", pb.DrainNodeRequest(job_id=job, node=arguments.node, reason=arguments.reason)
        case Command.RESUME:
            return "ResumeNode", pb.ResumeNodeRequest(job_id=job, node=arguments.node)
        case Command.RESIZE:
            few, many = arguments.nodes
            return "ResizeJob", pb.ResizeJobRequest(job_id=job, min_nodes=few, max_nodes=many)
        case Command.RESTART:
            return "RestartJob", pb.RestartJobRequest(job_id=job, reason=arguments.reason)
        case Command.ABORT:
            return "AbortJob", pb.AbortJobRequest(job_id=job, reason=arguments.reason)
        case _:
            assert_never(order)
