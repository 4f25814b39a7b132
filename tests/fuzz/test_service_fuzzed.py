"""A service that stands, under random bytes at each of its doors, runs jobs meanwhile and makes no mistake."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import socket
from typing import TYPE_CHECKING, Any

import grpc
import on_the_wire
from fuzz import mutated
from served import LOST_ANSWER, Service, agents, serving, soon

from rendezvous.client.channel import open_channel
from rendezvous.client.credential_files import ClientOptions
from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.values.events import Ended, RanksFinished
from rendezvous.values.types import JobSpec

if TYPE_CHECKING:
    from collections.abc import Callable

SEED = 1
CONNECTIONS = 60
CALLS_EACH = 6
JOBS = 5
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
METHODS = [f"/{s.full_name}/{m.name}" for s in pb.DESCRIPTOR.services_by_name.values() for m in s.methods]
SPOKEN = [seed for _, _, _, seeds, *_ in on_the_wire.TARGETS[:1] for seed in seeds]


def noise(chance: random.Random) -> bytes:
    return chance.randbytes(chance.randint(1, 400))


def frames(chance: random.Random) -> bytes:
    """HTTP/2 as far as its first bytes; then frames of every kind, with lengths that may be true."""
    said = [PREFACE]
    for _ in range(chance.randint(1, 12)):
        body = noise(chance)
        length = len(body) if chance.random() < 0.7 else chance.randrange(1 << 24)
        head = length.to_bytes(3, "big") + bytes([chance.randrange(11), chance.randrange(256)])
        said.append(head + chance.choice([0, 1, 3, 2**31 - 1]).to_bytes(4, "big") + body)
    return b"".join(said)


def request_lines(chance: random.Random) -> bytes:
    return mutated(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n", chance)


def throw(address: str, made: Callable[[random.Random], bytes], chance: random.Random) -> None:
    host, _, port = address.rpartition(":")
    for _ in range(CONNECTIONS):
        with (
            contextlib.suppress(OSError),
            socket.create_connection((host, int(port)), timeout=5) as connection,
        ):
            connection.sendall(made(chance))


async def call_badly(endpoint: str, chance: random.Random) -> int:
    """Well-framed calls of every method with messages that are nearly right. -> how many were refused"""
    refused = 0
    async with open_channel(endpoint, ClientOptions()) as channel:
        for method in METHODS:
            for _ in range(CALLS_EACH):
                call: Any = channel.stream_stream(method)(timeout=0.5 if "Attend" in method else 2.0)
                try:
                    await call.write(mutated(chance.choice(SPOKEN)[1:], chance))
                    await call.done_writing()
                    while await call.read() is not grpc.aio.EOF:
                        pass
                except (grpc.RpcError, asyncio.InvalidStateError):
                    pass
                code = await call.code()
                details = await call.details()
                of_service = (
                    code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN) and details != LOST_ANSWER
                )
                assert not of_service, (method, details)
                refused += code is not grpc.StatusCode.OK
    return refused


async def a_job_runs(endpoint: str, job_id: str) -> None:
    async with agents(endpoint, JobSpec(job_id, 2, 2, "train.py", lease_s=60.0), ["a", "b"]) as nodes:
        for generation in await asyncio.gather(*(node.run() for node in nodes)):
            assert generation == 1
        for node in nodes:
            node.session.send(RanksFinished(node.id, 1))
        for ended in await asyncio.gather(*(node.expect(Ended) for node in nodes)):
            assert ended.outcome.succeeded


async def story(service: Service, http: str) -> None:
    chance = random.Random(SEED)
    doors = ((service.endpoint, noise), (service.endpoint, frames), (http, noise), (http, request_lines))
    throwing = [asyncio.to_thread(throw, door, made, random.Random(chance.random())) for door, made in doors]
    jobs = [a_job_runs(service.endpoint, f"beside-{n}") for n in range(JOBS)]
    refused, *_ = await asyncio.gather(call_badly(service.endpoint, chance), *throwing, *jobs)
    assert refused > len(METHODS)
    await a_job_runs(service.endpoint, "afterwards")


def test_random_bytes_on_all_ports_do_not_affect_jobs() -> None:
    with serving("--http", "127.0.0.1:0") as service:
        (http,) = re.findall(r"metrics at (\S+)", "".join(service.log))
        before = service.resident
        soon(story(service, http))
        assert service.resident - before < 64 * 2**20
        log = "".join(service.log)
        assert "Traceback" not in log, log
        assert "internal error" not in log, log
