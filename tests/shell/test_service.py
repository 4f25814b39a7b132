"""The service in a process of its own: worlds form, streams break and resume, services die and come back."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from ports import free_port
from served import Agent, Cable, Service, agents, serving, soon

from rendezvous.client.channel import open_channel
from rendezvous.client.credential_files import ClientOptions
from rendezvous.client.session import connect
from rendezvous.control.ctl import main as ctl
from rendezvous.control.service import Service as Operations
from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.values.events import (
    AgentStopped,
    Ended,
    RankFailed,
    RanksFinished,
    Refused,
    Stop,
    Waiting,
)
from rendezvous.values.types import (
    AgentId,
    Cause,
    DecisionKind,
    FailureClass,
    JobSpec,
    RestartBudget,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# A lease that no busy machine outlasts: only some tests are about its end.
TWO = JobSpec("job", 2, 2, "train.py", budget=RestartBudget(3), lease_s=60.0)
ONE = JobSpec("job", 1, 1, "train.py", lease_s=60.0)


@pytest.fixture
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    with serving("--http", "127.0.0.1:0", *getattr(request, "param", ())) as started:
        yield started


def operations(endpoint: str) -> Operations:
    return Operations([endpoint], ClientOptions(), 10.0)


async def notes(endpoint: str, job: str = "job") -> list[Any]:
    return [note async for note in operations(endpoint).notes(job, follow=False)]


# --- the life of a job -----------------------------------------------------------------------------------


def test_a_world_forms_fails_restarts_and_ends(service: Service) -> None:
    async def story() -> None:
        async with agents(service.endpoint, TWO, ["a", "b"]) as (a, b):
            assert await asyncio.gather(a.run(), b.run()) == [1, 1]
            failed = b if b.assignment and b.assignment.node_rank == 1 else a
            cause = Cause(failed.id.node, 1, 0, FailureClass.USER_EXCEPTION, "ValueError: bad", 1, ran_s=60.0)
            failed.session.send(RankFailed(failed.id, 1, cause))
            for agent in (a, b):
                stop = await agent.expect(Stop)
                assert stop.decision.kind is DecisionKind.RESTART
                assert "ValueError: bad" in stop.decision.reason
                agent.session.send(AgentStopped(agent.id, 1))
            assert await asyncio.gather(a.run(), b.run()) == [2, 2]
            for agent in (a, b):
                agent.session.send(RanksFinished(agent.id, 2))
            assert (await a.expect(Ended)).outcome.succeeded
            assert (await b.expect(Ended)).outcome.restarts == 1

    soon(story())


def test_an_agent_whose_stream_stays_broken_is_lost_when_its_lease_ends(service: Service) -> None:
    async def story() -> None:
        cable, job = Cable(service.endpoint), replace(TWO, lease_s=2.0)
        async with cable as endpoint, agents(service.endpoint, job, ["a"]) as (a,):
            b = Agent(connect([endpoint], AgentId("b", "1"), ClientOptions()), AgentId("b", "1"), job)
            await asyncio.gather(a.run(), b.run())
            cable._server.close()
            cable.cut()
            stop = await a.expect(Stop)
            assert stop.decision.kind is DecisionKind.WAIT
            assert "node b was lost" in stop.decision.reason
            await b.session.close()

    soon(story())


def test_two_specs_that_disagree_are_told_the_field_and_both_values(service: Service) -> None:
    async def story() -> None:
        other = replace(TWO, entry_point="other.py")
        async with agents(service.endpoint, TWO, ["a"]) as (a,):
            await a.expect(Waiting)
            async with agents(service.endpoint, other, ["b"]) as (b,):
                refused = await b.expect(Refused)
                assert refused.exit_code == 78
                assert "the job has train.py, this node has other.py" in refused.reason
            async with agents(service.endpoint, TWO, ["c"]) as (c,):
                await asyncio.gather(a.run(), c.run())  # the round is not poisoned by it

    soon(story())


# --- the service's own end ---------------------------------------------------------------------------------


def test_a_running_job_outlives_a_service_that_is_told_to_end(tmp_path: Path) -> None:
    """A service that is killed in each phase of a job is played by tests/sim."""
    store = ("--store", f"file:{tmp_path}/jobs")

    async def story() -> None:
        endpoint = f"127.0.0.1:{free_port()}"  # one that nobody is given while the service is away
        first = Service("--listen", endpoint, *store)
        await asyncio.to_thread(first.await_endpoint)
        async with agents(endpoint, TWO, ["a", "b"]) as (a, b):
            try:
                await asyncio.gather(a.run(), b.run())
                await asyncio.to_thread(first.end)
                a.session.send(RanksFinished(a.id, 1))  # to nobody, for now
                second = Service("--listen", endpoint, *store)
                await asyncio.to_thread(second.await_endpoint)
                b.session.send(RanksFinished(b.id, 1))
                for agent in (a, b):
                    outcome = (await agent.expect(Ended)).outcome
                    assert (outcome.succeeded, outcome.restarts) == (True, 0)
                second.close()
            finally:
                first.close()

    soon(story())


def test_a_port_in_use_is_told_in_one_line(service: Service) -> None:
    second = Service("--listen", service.endpoint)
    assert second.wait() == 1
    said = "".join(second.log)
    assert said.startswith(f"ddp-rendezvous: cannot listen on {service.endpoint}: Address already in use")
    assert said.count("\n") == 1


def test_a_path_that_no_socket_can_have_is_told_in_one_line(tmp_path: Path) -> None:
    service = Service("--listen", f"unix:{tmp_path}/nowhere/socket")
    assert service.wait() == 1
    words = f"cannot listen on unix:{tmp_path}/nowhere/socket: No such file or directory"
    said = "".join(service.log)
    assert said.startswith(f"ddp-rendezvous: {words}")
    assert said.count("\n") == 1


# --- operators ---------------------------------------------------------------------------------------------


def test_orders_are_carried_out_and_answered(service: Service) -> None:
    spec = replace(ONE, max_nodes=2, last_call_s=30.0)

    async def story() -> None:
        ops = operations(service.endpoint)
        async with agents(service.endpoint, spec, ["a", "b"]) as (a, b):
            await asyncio.gather(a.run(), b.run())
            listed = await ops.call("ListJobs", pb.ListJobsRequest())
            assert [(job.job_id, job.phase, job.nodes) for job in listed.jobs] == [
                ("job", pb.PHASE_RUNNING, 2)
            ]
            drained = await ops.call("DrainNode", pb.DrainNodeRequest(job_id="job", node="b", reason="disk"))
            assert drained.job.phase == pb.PHASE_STOPPING
            for agent in (a, b):
                assert "draining b: disk" in (await agent.expect(Stop)).decision.reason
                agent.session.send(AgentStopped(agent.id, 1))
            assert await a.run() == 2
            job = (await ops.call("GetJob", pb.GetJobRequest(job_id="job"))).job
            assert [(n.node, n.HasField("node_rank")) for n in job.nodes] == [("a", True), ("b", False)]
            assert "disk" in job.nodes[1].excluded
            await ops.call("ResumeNode", pb.ResumeNodeRequest(job_id="job", node="b"))
            await ops.call("RestartJob", pb.RestartJobRequest(job_id="job", reason="because"))
            assert "ordered by an operator: because" in (await a.expect(Stop)).decision.reason
            a.session.send(AgentStopped(a.id, 2))
            assert await asyncio.gather(a.run(), b.run()) == [3, 3]
            resized = await ops.call("ResizeJob", pb.ResizeJobRequest(job_id="job", min_nodes=1, max_nodes=1))
            assert (resized.job.phase, resized.job.max_nodes) == (pb.PHASE_STOPPING, 1)
            await ops.call("AbortJob", pb.AbortJobRequest(job_id="job", reason="enough"))
            for agent in (a, b):
                await agent.expect(Stop)
                agent.session.send(AgentStopped(agent.id, 3))
            assert "aborted by an operator: enough" in (await a.expect(Ended)).outcome.reason
        with pytest.raises(grpc.RpcError, match="job 'job' has ended: aborted by an operator: enough"):
            await ops.call("RestartJob", pb.RestartJobRequest(job_id="job"))
        await ops.call("AbortJob", pb.AbortJobRequest(job_id="job"))  # which is what it is already

    soon(story())


def test_events_are_followed_to_the_end_of_the_job(service: Service) -> None:
    async def follow() -> list[str]:
        return [note.kind async for note in operations(service.endpoint).notes("job", follow=True)]

    async def story() -> None:
        async with agents(service.endpoint, ONE, ["a"]) as (a,):
            await a.run()
            following = asyncio.get_running_loop().create_task(follow())
            a.session.send(RanksFinished(a.id, 1))
            assert await following == ["joined", "sealed", "running", "decision", "ended"]

    soon(story())


def test_ddpctl_speaks_json_and_text(service: Service) -> None:
    def ddpctl(*arguments: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"DDP_RENDEZVOUS": service.endpoint}
        command = [sys.executable, "-m", "rendezvous.control.ctl", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=env, timeout=100, check=False)

    async def story() -> None:
        async with agents(service.endpoint, ONE, ["a"]) as (a,):
            await a.run()
            listed = await asyncio.to_thread(ddpctl, "list", "-o", "json")
            assert json.loads(listed.stdout)["jobs"][0]["phase"] == "PHASE_RUNNING"
            status = await asyncio.to_thread(ddpctl, "status", "job")
            assert "assigned" in status.stdout
            events = await asyncio.to_thread(ddpctl, "events", "job", "-o", "json")
            assert [json.loads(line)["kind"] for line in events.stdout.splitlines()] == [
                "joined",
                "sealed",
                "running",
            ]
            nothing = await asyncio.to_thread(ddpctl, "status", "nope")
            assert (nothing.returncode, "'nope'" in nothing.stderr) == (1, True)
            slip = await asyncio.to_thread(ddpctl, "drain", "job", "aa")
            assert slip.returncode == 0
            assert "aa now (its nodes: a)" in slip.stderr
            undone = await asyncio.to_thread(ddpctl, "resume", "job", "aa")
            assert (undone.returncode, undone.stderr) == (0, "")
            again = await asyncio.to_thread(ddpctl, "resume", "job", "aa")
            assert (again.returncode, again.stderr) == (
                0,
                "ddpctl: node aa of job job is not drained (drained or excluded nodes: none), "
                "so there is nothing to resume\n",
            )
            silent = f"127.0.0.1:{free_port()}"
            partly = await asyncio.to_thread(ddpctl, "--rendezvous", f"{silent},{service.endpoint}", "list")
            assert "running" in partly.stdout
            assert f"no answer from {silent} (" in partly.stderr

    soon(story())


def test_ddpctl_tells_of_a_full_disk_in_one_line(service: Service) -> None:
    command = [sys.executable, "-m", "rendezvous.control.ctl", "--rendezvous", service.endpoint, "list"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=100, check=False
        )
    words = "ddpctl: cannot write to standard output: No space left on device [DDP-1016]\n"
    assert (done.returncode, done.stderr) == (1, words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("list", "--rendezvous", ","), "--rendezvous is empty"),
        (("--rendezvous", "127.0.0.1:99999", "list"), "--rendezvous: invalid address '127.0.0.1:99999'"),
        (("list", "--timeout", "nan"), "invalid --timeout nan"),
        (
            ("status", "\udcff"),
            "invalid argument",
        ),
    ],
)
def test_ddpctl_tells_nonsense_in_one_line(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ctl(arguments) == 2
    said = capsys.readouterr().err
    assert (said.startswith(f"ddpctl: {words}"), said.count("\n")) == (True, 1)


# --- scripts -------------------------------------------------------------------------------------------------


async def scratch(endpoint: str, method: str, request: Any) -> Any:
    async with open_channel(endpoint, ClientOptions()) as channel:
        call: Any = channel.unary_unary(f"/rendezvous.v1.Scratchpad/{method}")
        return getattr(pb, f"{method}Response").FromString(
            await call(request.SerializeToString(), timeout=60)
        )


async def code_of(coroutine: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        await coroutine
    found: grpc.StatusCode = caught.value.code()  # type: ignore[attr-defined]
    return found


def test_scripts_keep_values_and_meet_at_barriers(service: Service) -> None:
    where = service.endpoint

    def put(key: str, value: bytes, **more: Any) -> Any:
        return scratch(where, "PutValue", pb.PutValueRequest(job_id="job", key=key, value=value, **more))

    def get(key: str, **more: Any) -> Any:
        return scratch(where, "GetValue", pb.GetValueRequest(job_id="job", key=key, **more))

    def enter(member: str, wait_s: float = 10.0) -> Any:
        request = pb.EnterBarrierRequest(job_id="job", name="ready", member=member, parties=2, wait_s=wait_s)
        return scratch(where, "EnterBarrier", request)

    async def story() -> None:
        assert await code_of(put("k", b"v")) is grpc.StatusCode.NOT_FOUND  # no such job
        async with agents(where, TWO, ["a"]) as (a,):
            await a.expect(Waiting)
            first = (await put("k", b"v1", expected_version=0)).version
            assert await code_of(put("k", b"v2", expected_version=0)) is grpc.StatusCode.FAILED_PRECONDITION
            waiting = asyncio.get_running_loop().create_task(get("k", after_version=first, wait_s=10.0))
            await put("k", b"v2")
            assert (await waiting).value == b"v2"
            assert await code_of(get("other")) is grpc.StatusCode.NOT_FOUND
            assert await code_of(get("other", wait_s=0.05)) is grpc.StatusCode.DEADLINE_EXCEEDED
            assert await code_of(put("k", bytes(70_000))) is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await code_of(put("rendezvous/k", b"")) is grpc.StatusCode.INVALID_ARGUMENT
            assert await code_of(enter("x", 0.05)) is grpc.StatusCode.DEADLINE_EXCEEDED
            assert await code_of(enter("x", 0.05)) is grpc.StatusCode.DEADLINE_EXCEEDED  # one member, twice
            met = await asyncio.gather(enter("x"), enter("y"))
            assert [m.arrived for m in met] == [2, 2]
            assert (await enter("x")).arrived == 2  # passed, and open from now on

    soon(story())


# --- the schema ---------------------------------------------------------------------------------------------


def test_tools_are_told_the_schema_when_asked_to() -> None:
    """The questions are grpcurl's, byte by byte."""
    ours, others = b"rendezvous.v1.Operations", b"etcdserverpb.TxnRequest"
    file = pb.DESCRIPTOR.name.encode()

    async def story(endpoint: str, version: str) -> None:
        async with open_channel(endpoint, ClientOptions()) as channel:
            call: Any = channel.stream_stream(
                f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
            )
            stream = call(timeout=60)

            async def told(field: int, what: bytes) -> bytes:
                await stream.write(bytes([field << 3 | 2, len(what)]) + what)
                return bytes(await stream.read())

            listed = await told(7, b"")
            assert all(name in listed for name in (ours, b"rendezvous.v1.Agents", b"grpc.health.v1.Health"))
            for field, what in ((3, file), (4, ours), (4, ours + b".ListJobs")):
                assert pb.DESCRIPTOR.serialized_pb in await told(field, what), what
            for field, what in ((3, b"other.proto"), (4, b"none.Such"), (4, others), (6, b"x")):
                refused = await told(field, what)
                assert pb.DESCRIPTOR.serialized_pb not in refused
                assert b"unknown" in refused or b"not supported" in refused
            await stream.done_writing()

    with serving("--reflection") as service:
        for version in ("v1", "v1alpha"):
            soon(story(service.endpoint, version))


# --- probes --------------------------------------------------------------------------------------------------


def test_probes_and_metrics(service: Service) -> None:
    port = next(line for line in service.log if "metrics at" in line).rsplit(":", 1)[1].strip()

    def fetch(path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
            return str(answer.read().decode())

    async def story() -> bytes:
        async with agents(service.endpoint, ONE, ["a"]) as (a,):
            await a.run()
            text = await asyncio.to_thread(fetch, "/metrics")
            assert 'ddp_rendezvous_jobs{phase="running"} 1' in text
            assert "ddp_rendezvous_streams 1\n" in text
        async with open_channel(service.endpoint, ClientOptions()) as channel:
            check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
            assert await check(b"\n\x14rendezvous.v1.Agents", timeout=60) == b"\x08\x01"
            assert await check(b"\n\x04live", timeout=60) == b"\x08\x01"
            assert await code_of(check(b"\n\x04none", timeout=60)) is grpc.StatusCode.NOT_FOUND
            answer: bytes = await check(b"", timeout=60)
            return answer

    assert soon(story()) == b"\x08\x01"
    assert (fetch("/livez"), fetch("/readyz")) == ("alive\n", "ready\n")
    with pytest.raises(urllib.error.HTTPError, match="404") as caught:
        fetch("/else")
    caught.value.close()
