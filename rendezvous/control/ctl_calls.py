"""The calls of ddpctl: each command is one call to the replica that owns the job."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any, assert_never

import grpc
import grpc.aio
from google.protobuf.json_format import MessageToDict

from rendezvous.client.channel import metadata, open_channel
from rendezvous.client.options import OptionsUnusable
from rendezvous.client.route import Route
from rendezvous.control.commands import Command
from rendezvous.control.ctl_text import event_line, job_table, job_text, named
from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.service.settings import SettingsUnusable, check_address
from rendezvous.values.wire_names import PORT

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator, Sequence

    from rendezvous.client.options import ClientOptions
    from rendezvous.control.commands import Order

OPERATIONS = "/rendezvous.v1.Operations/"
_ROUNDS = 3
_PAUSE_S = 0.25
_FOLLOWED_S = 60.0  # for which `watch` keeps trying while no replica has the job


class Service:
    def __init__(self, endpoints: Sequence[str], options: ClientOptions, timeout_s: float) -> None:
        self.endpoints, self.options, self._timeout_s = tuple(endpoints), options, timeout_s

    async def call(self, method: str, request: Any) -> Any:
        """Try one endpoint after another, and follow redirects. Raises the last `AioRpcError`."""
        route, left = Route(self.endpoints), 2 * _ROUNDS * len(self.endpoints)  # half of them for redirects
        while True:
            try:
                return await self.ask(route.endpoint, method, request)
            except grpc.aio.AioRpcError as error:
                route.refused(error)
                left -= 1 if route.owner else 2
                if error.code() is not grpc.StatusCode.UNAVAILABLE or left <= 0:
                    raise
            await asyncio.sleep(_PAUSE_S)

    async def ask(self, endpoint: str, method: str, request: Any) -> Any:
        async with open_channel(endpoint, self.options) as channel:
            call: Any = channel.unary_unary(OPERATIONS + method)
            data = request.SerializeToString()
            answer = await call(data, metadata=metadata(self.options), timeout=self._timeout_s)
            return getattr(pb, f"{method}Response").FromString(answer)

    async def notes(self, job_id: str, *, follow: bool) -> AsyncIterator[Any]:
        """Yield each event of a job exactly once, even if the stream breaks or another replica takes over."""
        latest, failed_since, found = pb.WatchEventsResponse(), 0.0, False
        route = Route(self.endpoints)
        loop = asyncio.get_running_loop()
        while True:
            request = pb.WatchEventsRequest(
                job_id=job_id, after_seq=latest.note.seq, journal_id=latest.journal_id, follow=follow
            )
            try:
                async for response in self._watch(route.endpoint, request):
                    latest, failed_since, found = response, 0.0, True
                    yield response.note
                return
            except grpc.aio.AioRpcError as error:
                route.refused(error)
                failed_since, found = failed_since or loop.time(), found or bool(route.owner)
                retry_s = _FOLLOWED_S if follow and found else _ROUNDS * _PAUSE_S
                if error.code() is not grpc.StatusCode.UNAVAILABLE or loop.time() - failed_since > retry_s:
                    raise
                await asyncio.sleep(_PAUSE_S)

    async def _watch(self, endpoint: str, request: Any) -> AsyncIterator[Any]:
        async with open_channel(endpoint, self.options) as channel:
            call: Any = channel.unary_stream(OPERATIONS + "WatchEvents")
            async for data in call(request.SerializeToString(), metadata=metadata(self.options)):
                yield pb.WatchEventsResponse.FromString(data)


async def carry_out(service: Service, arguments: argparse.Namespace) -> int:
    command = Command(arguments.command)
    as_json = arguments.output == "json" or command is Command.GET
    match command:
        case Command.LIST:
            jobs = await _all_jobs(service)
            _show({"jobs": [_dict(job) for job in jobs]} if as_json else job_table(jobs))
        case Command.STATUS | Command.GET:
            job = (await service.call("GetJob", pb.GetJobRequest(job_id=arguments.job))).job
            _show(_dict(job) if as_json else job_text(job))
        case Command.EVENTS | Command.WATCH:
            async for note in service.notes(arguments.job, follow=command is Command.WATCH):
                _show(_dict(note) if as_json else event_line(note), compact=True)
        case Command.DRAIN | Command.RESUME | Command.RESIZE | Command.RESTART | Command.ABORT:
            await _give(service, command, arguments, as_json=as_json)
        case _:
            assert_never(command)
    return 0


async def _give(service: Service, order: Order, arguments: argparse.Namespace, *, as_json: bool) -> None:
    words = await _warn_not_drained(service, arguments) if order is Command.RESUME else ""
    job = (await service.call(*request_of(order, arguments))).job
    _show(_dict(job) if as_json else job_table([job]))
    if order is Command.DRAIN:
        words = await _warn_unknown_node(service, arguments)
    if words:
        sys.stderr.write(f"ddpctl: {words}\n")


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


async def _all_jobs(service: Service) -> list[Any]:
    """All jobs: each replica lists those that it owns."""
    jobs: dict[str, Any] = {}
    last: grpc.aio.AioRpcError | None = None
    reached, unreachable = 0, list[str]()
    for endpoint in service.endpoints:
        try:
            answer = await service.ask(endpoint, "ListJobs", pb.ListJobsRequest())
        except grpc.aio.AioRpcError as error:
            last = error
            unreachable.append(f"{endpoint} ({error.details() or error.code().name.lower()})")
            continue
        reached += 1
        jobs |= {job.job_id: job for job in answer.jobs}
    if last is not None and not reached:
        raise last
    if unreachable:
        sys.stderr.write(f"ddpctl: the list may be incomplete: no answer from {', '.join(unreachable)}\n")
    return [jobs[job_id] for job_id in sorted(jobs)]


def request_of(order: Order, arguments: argparse.Namespace) -> tuple[str, Any]:
    """The method of the service, and its request."""
    job = arguments.job
    match order:
        case Command.DRAIN:
            return "DrainNode", pb.DrainNodeRequest(job_id=job, node=arguments.node, reason=arguments.reason)
        case Command.RESUME:
            return "ResumeNode", pb.ResumeNodeRequest(job_id=job, node=arguments.node)
        case Command.RESIZE:
            few, many = _nodes(arguments.nodes)
            return "ResizeJob", pb.ResizeJobRequest(job_id=job, min_nodes=few, max_nodes=many)
        case Command.RESTART:
            return "RestartJob", pb.RestartJobRequest(job_id=job, reason=arguments.reason)
        case Command.ABORT:
            return "AbortJob", pb.AbortJobRequest(job_id=job, reason=arguments.reason)
        case _:
            assert_never(order)


def endpoints(text: str) -> list[str]:
    """The endpoints in `text`. Raises `OptionsUnusable`."""
    words = (word.strip() for word in text.split(","))
    found = [word if ":" in word.rpartition("]")[2] else f"{word}:{PORT}" for word in words if word]
    try:
        for endpoint in found:
            check_address(endpoint)
    except SettingsUnusable as error:
        raise OptionsUnusable(f"--rendezvous: {error}") from None
    if not found:
        raise OptionsUnusable("--rendezvous is empty: give at least one HOST:PORT")
    return found


def _nodes(text: str) -> tuple[int, int]:
    few, colon, many = text.partition(":")
    if not text.isascii() or not few.isdigit() or (colon and not many.isdigit()) or len(text) > 15:
        raise OptionsUnusable(f"invalid number of nodes {text!r}: use N or MIN:MAX, for example 4 or 2:8")
    return int(few), int(many or few)


def _dict(message: Any) -> dict[str, Any]:
    found: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return found


def _show(what: dict[str, Any] | str, *, compact: bool = False) -> None:
    text = what if isinstance(what, str) else json.dumps(what, indent=None if compact else 2)
    sys.stdout.write(text.rstrip("\n") + "\n")
    sys.stdout.flush()
