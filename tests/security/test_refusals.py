"""Clients without access: their own command says why, and the service logs each reason once and counts it.

A TLS handshake that fails does not reach our code on the service's side: there the client's command alone says why.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import pytest
from authority import Authority
from served import agents, join_bytes, soon
from strangers import NOT_ALLOWED, Watched, ddp_launch, ddpctl, made, token

from rendezvous.client.channel import open_channel
from rendezvous.client.credential_files import ClientOptions
from rendezvous.values.events import Refused, Waiting
from rendezvous.values.types import JobSpec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path
    from typing import Any

JOB = "team-a-1"
SPEC = JobSpec(JOB, 2, 2, "train.py")


@dataclass(frozen=True)
class Listener:
    """A service with mutual TLS and tokens, and what it takes to pass."""

    service: Watched
    keys: str
    folder: Path
    env: dict[str, str]


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listener]:
    folder = tmp_path_factory.mktemp("door")
    authority = Authority(folder, "authority")
    stranger = Authority(folder, "stranger")
    certificate, key = authority.issue("server")
    for name, issuer, days in (
        ("member", authority, 1),
        ("late", authority, -1),
        ("unknown", stranger, 1),
    ):
        issuer.issue(name, days=days)
    keys = str(folder / "keys")
    made("key", keys)
    tls = ("--tls-cert", certificate, "--tls-key", key, "--client-ca", authority.certificate)
    service = Watched("--listen", "127.0.0.1:0", "--token-keys", keys, *tls)
    good = {"CA_FILE": authority.certificate, **pair(folder, "member"), "TOKEN": token(keys, "agent", JOB)}
    try:
        yield Listener(service, keys, folder, good)
    finally:
        service.close()


def pair(folder: Path, name: str) -> dict[str, str]:
    return {"CERT_FILE": str(folder / f"{name}.pem"), "KEY_FILE": str(folder / f"{name}.key")}


def variables(said: dict[str, str]) -> dict[str, str]:
    return {f"DDP_RENDEZVOUS_{name}": value for name, value in said.items() if value}


def test_who_has_all_that_is_asked_for_comes_in(door: Listener) -> None:
    assert ddpctl(door.service.endpoint, variables(door.env)).told() == (0, "")


HANDSHAKES = {
    "another CA for the service": (
        {"CA_FILE": "stranger.pem"},
        ("cannot trust the certificate", "set DDP_RENDEZVOUS_CA_FILE"),
    ),
    "no certificate": (
        {"CERT_FILE": "", "KEY_FILE": ""},
        ("requires a client certificate", "set DDP_RENDEZVOUS_CERT_FILE and DDP_RENDEZVOUS_KEY_FILE"),
    ),
    "an expired certificate": (
        {"CERT_FILE": "late.pem", "KEY_FILE": "late.key"},
        ("rejected the client certificate", "not expired"),
    ),
    "a certificate of another CA": (
        {"CERT_FILE": "unknown.pem", "KEY_FILE": "unknown.key"},
        ("rejected the client certificate", "--client-ca"),
    ),
    "no TLS": (
        {"CA_FILE": "", "CERT_FILE": "", "KEY_FILE": ""},
        ("uses TLS and this client does not", "set DDP_RENDEZVOUS_CA_FILE"),
    ),
}


@pytest.mark.parametrize("fault", HANDSHAKES)
def test_the_command_says_why_a_handshake_failed(door: Listener, fault: str) -> None:
    changed, words = HANDSHAKES[fault]
    env = door.env | {name: value and str(door.folder / value) for name, value in changed.items()}
    endpoint = door.service.endpoint
    for knock in (ddpctl(endpoint, variables(env)), ddp_launch(endpoint, variables(env), JOB)):
        knock.told_no(*words)


@pytest.mark.parametrize(
    "reason", ["expired_token", "bad_token", "unknown_key", "no_token", "other_job", "role"]
)
def test_an_invalid_token_is_reported_logged_once_and_counted(
    door: Listener, tmp_path: Path, reason: str
) -> None:
    """A viewer's, or an agent's, is shown where an order is given; a viewer's where an agent joins."""
    other_keys = str(tmp_path / "keys")
    made("key", other_keys)
    shown, words = {
        "expired_token": (token(door.keys, "agent", JOB, -1.0), "the token expired"),
        "bad_token": (door.env["TOKEN"][:-4] + "AAAA", "signed with another key"),
        "unknown_key": (token(other_keys, "agent", JOB), "signed with a key that this service does not have"),
        "no_token": ("", "DDP_RENDEZVOUS_TOKEN"),
        "other_job": (token(door.keys, "operator", "team-b-*"), f"not for job '{JOB}'"),
        "role": (token(door.keys, "viewer", JOB), "a token with role viewer"),
    }[reason]
    env = variables(door.env | {"TOKEN": shown})
    before, endpoint = door.service.refused(reason), door.service.endpoint
    order = ddpctl(endpoint, env, "abort", JOB)
    if reason != "other_job":
        ddp_launch(endpoint, env, JOB).told_no(words, "rejected this agent")
    order.told_no(words)
    door.service.await_refused(reason, before)
    door.service.assert_logged_once(reason)
    assert not shown or shown not in "".join(door.service.log)


def test_an_agents_token_is_for_its_own_job_and_cannot_send_commands(door: Listener) -> None:
    env, endpoint = variables(door.env), door.service.endpoint
    orders = (
        ("abort", JOB),
        ("restart", JOB),
        ("drain", JOB, "n"),
        ("resume", JOB, "n"),
        ("resize", JOB, "2"),
    )
    for order in [ddpctl(endpoint, env, *words) for words in orders]:
        order.told_no("role agent", "control jobs")
    ddp_launch(endpoint, env, "team-b-1").told_no("not for job 'team-b-1'")
    door.service.assert_logged_once("other_job")


def test_an_order_that_looks_first_is_refused_once(door: Listener) -> None:
    """`ddpctl resume` asks who is kept out before it lets a node in."""
    env = variables(door.env | {"TOKEN": token(door.keys, "operator", "team-b-*")})
    before = door.service.refused("other_job")
    ddpctl(door.service.endpoint, env, "resume", JOB, "n").told_no(f"not for job '{JOB}'")
    assert door.service.refused("other_job") == before + 1


def test_repeated_refusals_are_logged_once(door: Listener) -> None:
    options = ClientOptions(
        "a.b.c", tls=True, ca_file=door.env["CA_FILE"], certificate_file=door.env["CERT_FILE"],
        key_file=door.env["KEY_FILE"],
    )  # fmt: skip
    before = door.service.refused("unknown_key")

    async def many() -> None:
        async with open_channel(door.service.endpoint, options) as channel:
            call: Any = channel.unary_unary("/rendezvous.v1.Operations/ListJobs")
            for _ in range(200):
                with pytest.raises(grpc.RpcError):
                    await call(b"", metadata=(("authorization", "Bearer a.b.c"),), timeout=60)

    soon(many())
    assert door.service.refused("unknown_key") == before + 200
    door.service.assert_logged_once("unknown_key")


# --- the other way round -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    service = Watched("--listen", "127.0.0.1:0")
    yield service
    service.close()


def test_tls_to_a_port_without_is_told(door: Listener, plain: Watched) -> None:
    env = variables({"CA_FILE": door.env["CA_FILE"]})
    for knock in (ddpctl(plain.endpoint, env), ddp_launch(plain.endpoint, env, JOB)):
        knock.told_no("does not use TLS", "DDP_RENDEZVOUS_CA_FILE")


def test_grpc_to_the_port_of_http_is_told_logged_once_and_counted(plain: Watched) -> None:
    for knock in [ddpctl(plain.http, {}) for _ in range(2)]:
        knock.told_no("not gRPC")
    plain.await_refused("http_port", 1)
    plain.assert_logged_once("http_port")


def test_a_port_where_nobody_listens_is_no_refusal() -> None:
    code, said = ddpctl("127.0.0.1:9", {}).told()
    assert (code, "no answer from 127.0.0.1:9" in said) == (75, True), said


# --- replayed joins ----------------------------------------------------------------------------------------


class Recorder:
    """A wire on which somebody listens: what a client says can be said once more."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.rpartition(":")
        self._to, self.heard = (host, int(port)), bytearray()
        self._serving: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        if self._serving:
            await asyncio.wait(self._serving)  # until both ends have hung up, and each was closed

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._serving.add(asyncio.create_task(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(*self._to)

        async def back() -> None:
            while data := await there_reader.read(65536):
                writer.write(data)

        async def forth() -> None:
            while data := await reader.read(65536):
                self.heard += data
                there_writer.write(data)

        ways = [asyncio.create_task(back()), asyncio.create_task(forth())]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for end in (writer, there_writer):
            end.close()
        await asyncio.wait(ways)
        for end in (writer, there_writer):
            with contextlib.suppress(OSError):
                await end.wait_closed()

    @contextlib.asynccontextmanager
    async def replayed(self) -> AsyncIterator[None]:
        """Over a connection that stays open, and is read: who hangs up is not even refused."""
        reader, writer = await asyncio.open_connection(*self._to)
        writer.write(bytes(self.heard))
        reading = asyncio.create_task(reader.read())
        try:
            yield
        finally:
            reading.cancel()
            await asyncio.wait([reading])
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def test_a_replayed_join_is_rejected(plain: Watched) -> None:
    """Byte for byte as it was overheard, where no TLS keeps anybody from hearing."""

    async def story() -> None:
        recorder = Recorder(plain.endpoint)
        async with recorder as wire, agents(wire, SPEC, ["a"]) as (a,):
            await a.expect(Waiting)
            before = plain.refused("replayed_join")
            async with recorder.replayed():
                await asyncio.to_thread(plain.await_refused, "replayed_join", before)
            async with agents(plain.endpoint, SPEC, ["b"]) as (b,):
                # Neither of them was cut off: the world of both is sealed over the streams that they have.
                assert await asyncio.gather(a.run(), b.run()) == [1, 1]
            assert not [line for line in plain.log if "its stream broke" in line and " a " in line]

    soon(story())
    (line,) = plain.lines_of("replayed_join")
    assert " a " in line


def test_who_replays_is_told_so(plain: Watched) -> None:
    spec = JobSpec("told", 2, 2, "train.py")

    async def knock(number: str) -> grpc.StatusCode:
        async with open_channel(plain.endpoint, ClientOptions()) as channel:
            numbered = (("rendezvous-stream", number),)
            call: Any = channel.stream_stream("/rendezvous.v1.Agents/Attend")(metadata=numbered, timeout=60)
            await call.write(join_bytes(spec, "x"))
            try:
                await call.read()
            except grpc.aio.AioRpcError as error:
                return error.code()
            call.cancel()
            return grpc.StatusCode.OK

    async def story() -> list[grpc.StatusCode]:
        return [await knock(number) for number in ("5", "5", "4", "", "6")]

    ok, no = grpc.StatusCode.OK, grpc.StatusCode.PERMISSION_DENIED
    assert soon(story()) == [ok, no, no, no, ok]


def test_a_replaced_incarnation_cannot_rejoin(plain: Watched) -> None:
    spec = JobSpec("lives", 2, 2, "train.py")

    async def story() -> Refused:
        async with agents(plain.endpoint, spec, ["a"], life="1") as (old,):
            await old.expect(Waiting)
            async with agents(plain.endpoint, spec, ["a"], life="2") as (new,):
                await new.expect(Waiting)
                async with agents(plain.endpoint, spec, ["a"], life="1") as (again,):
                    return await again.expect(Refused)

    refused = soon(story())
    assert refused.exit_code == NOT_ALLOWED
    assert "was replaced" in refused.reason
    assert 'turned_away_total{why="final"} 1' in plain.metrics()


# --- who was let in, and breaks the rules --------------------------------------------------------------------


def test_streams_that_break_the_rules_share_a_line(plain: Watched) -> None:
    before = plain.refused("stream_aborted")

    async def story() -> None:
        async with open_channel(plain.endpoint, ClientOptions()) as channel:
            attend: Any = channel.stream_stream("/rendezvous.v1.Agents/Attend")
            for number in range(20):
                stream = attend()
                await stream.write(join_bytes(JobSpec("noisy", 50, 50), f"n{number}"))
                await stream.read()
                await stream.write(b"\xff")
                with contextlib.suppress(grpc.RpcError):
                    while await stream.read() is not grpc.aio.EOF:
                        pass
                assert await stream.code() is grpc.StatusCode.INVALID_ARGUMENT

    soon(story())
    assert plain.refused("stream_aborted") == before + 20
    plain.assert_logged_once("stream_aborted")
