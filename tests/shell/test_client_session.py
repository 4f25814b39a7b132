"""The agent's session: it outlives services and addresses, and gives up only when that is right."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from served import Agent, Service, agents, serving, soon

from rendezvous.client import remote_session, session_rules
from rendezvous.client.credential_files import ClientOptions, OptionsUnusable, client_options
from rendezvous.client.session import connect
from rendezvous.client.session_rules import PATIENCE_S, patience
from rendezvous.service import server
from rendezvous.values.events import AgentLeft, Refused, Stop, StoreAt, Waiting
from rendezvous.values.types import AgentId, JobSpec, RestartBudget

if TYPE_CHECKING:
    from pathlib import Path

TWO = JobSpec("job", 2, 2, "train.py", lease_s=60.0)
NOBODY = "127.0.0.1:1"  # a port that refuses


def test_no_service_at_all_ends_in_75_and_says_what_was_tried() -> None:
    async def story() -> None:
        async with agents([NOBODY, "127.0.0.1:2"], TWO, ["a"], ClientOptions(give_up_s=3.0)) as (a,):
            refused = await a.expect(Refused)
            assert refused.exit_code == 75
            assert "127.0.0.1:1: unavailable" in refused.reason
            assert "127.0.0.1:2: unavailable" in refused.reason

    soon(story())


def test_a_service_that_accepts_and_never_answers_is_passed_over() -> None:
    async def story(silent: str, endpoint: str) -> None:
        for _ in range(3):
            async with agents([silent, endpoint], TWO, ["a"]) as (a,):
                await a.expect(Waiting)

    with serving() as service, socket.create_server(("127.0.0.1", 0)) as silent:
        soon(story(f"127.0.0.1:{silent.getsockname()[1]}", service.endpoint))


def test_the_service_waits_for_an_agent_longer_than_the_agent_for_the_service() -> None:
    """Or it closes connections of agents that would have come through, if thousands connect at once."""
    assert (
        dict(server._OPTIONS)["grpc.server_handshake_timeout_ms"] > 1000.0 * session_rules._LONGEST_CONNECT_S
    )


def test_a_frozen_service_is_left_for_another() -> None:
    """Not shared state: only that the session moves on by itself, and joins where it comes to.

    And is as soon gone the next time: it had its answers there, so it was not too busy to give them.
    """

    async def story(first: Service, second: Service) -> None:
        async with agents([first.endpoint], TWO, ["a"]) as (a,):
            await a.expect(Waiting)
            known = (first.endpoint, second.endpoint)
            a.session._state = replace(a.session._state, endpoints=known)  # type: ignore[attr-defined]
            first._process.send_signal(signal.SIGSTOP)
            async with agents([second.endpoint], TWO, ["b"]) as (b,):
                await asyncio.gather(a.run(), b.run())
                assert patience(a.session._state) == PATIENCE_S  # type: ignore[attr-defined]

    with serving() as first, serving() as second:
        soon(story(first, second))


def test_closing_delivers_the_goodbye(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rendezvous.client.remote_session._CLOSE_S", 60.0)  # the moment may be a long one

    async def story(endpoint: str) -> None:
        spec = JobSpec("job", 2, 2, "train.py", budget=RestartBudget(3), lease_s=60.0)
        async with agents(endpoint, spec, ["a"]) as (a,):
            b = Agent(connect([endpoint], AgentId("b", "1"), ClientOptions()), AgentId("b", "1"), spec)
            await asyncio.gather(a.run(), b.run())
            b.session.send(AgentLeft(b.id, "asked to go"))
            await b.session.close()
            assert "left: asked to go" in (await a.expect(Stop)).decision.reason

    with serving() as service:
        soon(story(service.endpoint))


def test_a_newer_stream_of_the_same_agent_takes_over() -> None:
    async def story(endpoint: str) -> None:
        spec = JobSpec("job", 1, 1, "train.py")
        async with agents(endpoint, spec, ["a"]) as (a,):
            await a.run()
            again = Agent(connect([endpoint], a.id, ClientOptions()), a.id, spec)
            await again.expect(StoreAt)
            await again.session.close()

    with serving() as service:
        soon(story(service.endpoint))


def test_closing_a_session_that_never_reached_anyone_is_quick() -> None:
    async def story() -> None:
        at = time.monotonic()
        async with agents([NOBODY], TWO, ["a"]):
            await asyncio.sleep(0)
        assert time.monotonic() - at < 20.0, "it does not try on until --join-timeout"

    soon(story())


# --- options -------------------------------------------------------------------------------------------------


def test_options_come_from_the_environment_and_files(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a.b.c\n")
    options = client_options({"DDP_RENDEZVOUS_TOKEN_FILE": str(token), "DDP_RENDEZVOUS_CA_FILE": "ca.pem"})
    assert (options.token, options.tls, options.ca_file) == ("a.b.c", True, "ca.pem")
    assert "a.b.c" not in repr(options)
    assert client_options({}) == ClientOptions()
    with pytest.raises(OptionsUnusable, match="CERT_FILE and DDP_RENDEZVOUS_KEY_FILE"):
        client_options({"DDP_RENDEZVOUS_CERT_FILE": "x"})
    with pytest.raises(OptionsUnusable, match="cannot read the token"):
        client_options({"DDP_RENDEZVOUS_TOKEN_FILE": str(tmp_path / "none")})


def test_a_token_does_not_go_over_a_connection_that_others_can_read() -> None:
    async def story() -> None:
        async with agents(["192.0.2.1:29400"], TWO, ["a"], ClientOptions(token="a.b.c")) as (a,):
            refused = await a.expect(Refused)
            assert refused.exit_code == 78
            assert "DDP_RENDEZVOUS_CA_FILE" in refused.reason
            assert "a.b.c" not in refused.reason

    soon(story())


def test_a_stream_ends_although_grpc_has_swallowed_its_cancellation() -> None:
    """It does if the service is lost while the stream of questions begins: the session waited for it for ever."""

    async def swallows_one() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    async def story() -> None:
        tasks = [asyncio.create_task(swallows_one()), asyncio.create_task(asyncio.Event().wait())]
        await asyncio.sleep(0)
        await remote_session._end(*tasks)
        assert all(task.cancelled() for task in tasks)

    soon(story())
