"""Hostile, broken, slow and too many clients: each is refused or idle, and the others notice nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from served import LOST_ANSWER, Service, agents, join_bytes, raw_stream, serving, soon

from rendezvous.codec import HEARTBEAT, from_agent_bytes
from rendezvous.service.server import raise_file_limit
from rendezvous.values.events import AgentStopped, Ended, RankFailed, RanksFinished, Waiting
from rendezvous.values.types import AgentId, Cause, FailureClass, JobSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

ONE = JobSpec("job", 1, 1, "train.py")


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serving() as started:
        yield started


async def a_job_runs(service: Service, job_id: str) -> float:
    """From the join to the end; how long that took."""
    at = time.monotonic()
    async with agents(service.endpoint, JobSpec(job_id, 1, 1, "train.py"), ["healthy"]) as (agent,):
        await agent.run()
        agent.session.send(RanksFinished(agent.id, 1))
        await agent.expect(Ended)
    return time.monotonic() - at


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    async with asyncio.timeout(60.0):
        return await call.code(), await call.details()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff\xff\xff\xff", "cannot decode the message as AgentMessage"),
        (b"", "the AgentMessage is empty"),
        (HEARTBEAT, "must be a join"),
        (b"\x0a\x00", "Join: field agent is missing"),
    ],
)
def test_bad_first_messages_are_named(service: Service, data: bytes, words: str) -> None:
    async def story() -> None:
        async with raw_stream(service.endpoint) as call:
            await call.write(data)
            code, details = await status_of(call)
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert words in details

    soon(story())


def test_a_bad_later_message_ends_its_own_stream_only(service: Service) -> None:
    async def story() -> None:
        async with raw_stream(service.endpoint) as call:
            await call.write(join_bytes(JobSpec("bad-later", 1, 1), "a"))
            await call.read()
            await call.write(b"\x1a\xff")
            assert (await status_of(call))[0] is grpc.StatusCode.INVALID_ARGUMENT
        await a_job_runs(service, "beside-bad-later")

    soon(story())


def test_a_stream_is_bound_to_one_agent(service: Service) -> None:
    async def story() -> None:
        async with raw_stream(service.endpoint) as call:
            spec = JobSpec("one-agents", 2, 2)
            await call.write(join_bytes(spec, "a"))
            await call.write(join_bytes(spec, "b"))
            code, details = await status_of(call)
            assert (code, "its own stream" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)

    soon(story())


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (JobSpec("job", 1, 1, lease_s=1e-6), "the lease is 1e-06"),
        (JobSpec("job", 3, 2), "--nnodes 3:2"),
        (JobSpec("", 1, 1), "the job id (--rdzv-id) has 0 characters"),
        (JobSpec("j\nfake line", 1, 1), "control characters"),
    ],
)
def test_a_spec_that_could_overload_the_service_is_refused(
    service: Service, spec: JobSpec, words: str
) -> None:
    async def story() -> None:
        from rendezvous.codec import read_to_agent
        from rendezvous.values.events import Refused

        async with raw_stream(service.endpoint) as call:
            await call.write(join_bytes(spec, "a"))
            refused = read_to_agent(await call.read())
            assert isinstance(refused, Refused)
            assert (refused.exit_code, refused.retryable) == (78, False)
            assert words in refused.reason

    soon(story())


async def code_of_a_huge_message(service: Service) -> grpc.StatusCode:
    async with raw_stream(service.endpoint) as call:
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            await call.write(bytes(16 * 2**20))
        code, details = await status_of(call)
    return code if details != LOST_ANSWER else await code_of_a_huge_message(service)


def test_a_huge_message_is_refused_before_it_is_kept(service: Service) -> None:
    async def story() -> None:
        before = service.resident
        for _ in range(5):
            assert await code_of_a_huge_message(service) is grpc.StatusCode.RESOURCE_EXHAUSTED
        await a_job_runs(service, "beside-huge")
        assert service.resident - before < 64 * 2**20

    soon(story())


def test_invalid_bytes_and_idle_connections_do_not_affect_other_clients(service: Service) -> None:
    host, _, port = service.endpoint.rpartition(":")
    before = service.resident
    with contextlib.ExitStack() as stack:
        for i in range(500):
            idle = stack.enter_context(socket.create_connection((host, int(port)), 60))
            if i % 5 == 0:
                with contextlib.suppress(OSError):
                    idle.sendall(os.urandom(512))
        assert soon(a_job_runs(service, "beside-idle")) < 25.0
        assert service.resident - before < 64 * 2**20


@pytest.fixture
def many_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_file_limit()
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("many_files")
def test_all_of_a_crowd_are_answered(service: Service) -> None:
    """gRPC's own limit, of which nobody was told: a thousand calls that the service has yet to look at."""

    async def story() -> None:
        async with contextlib.AsyncExitStack() as stack:
            calls = []
            for _ in range(2000):
                alone = (("grpc.use_local_subchannel_pool", 1),)
                channel = grpc.aio.insecure_channel(service.endpoint, options=alone)
                check = (await stack.enter_async_context(channel)).unary_unary("/grpc.health.v1.Health/Check")
                calls.append(check(b"", wait_for_ready=True))
            codes = await asyncio.gather(*(call.code() for call in calls))
        assert Counter(codes) == {grpc.StatusCode.OK: 2000}

    soon(story())


def test_a_client_that_does_not_read_is_cut_off_and_slows_nobody() -> None:
    """Every join of a job that has failed is answered with its outcome, which is long."""
    agent, spec = AgentId("a", "1"), JobSpec("slow-reader", 1, 1)
    cause = Cause("a", 0, 0, FailureClass.USER_EXCEPTION, "ValueError", 1, traceback="x" * 16_000)

    async def story(service: Service) -> None:
        before = service.resident
        async with raw_stream(service.endpoint) as call:
            await call.write(join_bytes(spec, "a"))
            await call.read()
            await call.write(from_agent_bytes(RankFailed(agent, 1, cause)))
            await call.write(from_agent_bytes(AgentStopped(agent, 1)))
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
                for _ in range(4000):
                    await call.write(join_bytes(spec, "a"))
            assert await a_job_runs(service, "beside-slow-reader") < 25.0
            with contextlib.suppress(grpc.RpcError):
                while await call.read() is not grpc.aio.EOF:
                    pass
            assert (await status_of(call))[0] is not grpc.StatusCode.OK
        await asyncio.to_thread(service.await_line, "stream_aborted.*a in job slow-reader")
        assert service.resident - before < 64 * 2**20

    with serving() as own:  # where no other stream was cut: one line stands for all of a minute
        soon(story(own))


def test_limits_have_error_messages() -> None:
    async def story(service: Service) -> None:
        async with agents(service.endpoint, JobSpec("one", 4, 4), ["a"]) as (a,):
            await a.expect(Waiting)
            async with raw_stream(service.endpoint) as call:
                await call.write(join_bytes(JobSpec("one", 4, 4), "b"))
                await call.read()
                async with raw_stream(service.endpoint) as third:
                    # Nothing is written: gRPC reports a write that fails as an error of its own, for the real one.
                    code, details = await status_of(third)
                    assert (code, "2 streams" in details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)

    with serving("--max-agents", "2") as service:
        soon(story(service))
    with serving("--max-jobs", "1") as service:
        soon(a_second_job_is_refused(service))


async def a_second_job_is_refused(service: Service) -> None:
    async with raw_stream(service.endpoint) as first, raw_stream(service.endpoint) as second:
        await first.write(join_bytes(JobSpec("one", 4, 4), "a"))
        await first.read()
        with contextlib.suppress(grpc.RpcError):
            await second.write(join_bytes(JobSpec("two", 2, 2), "a"))
        code, details = await status_of(second)
        assert (code, "1 jobs" in details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
