"""Tokens and certificates are replaced in their files while jobs run; whoever is in a job stays in it."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from certificates import Authority
from served import Cable, agents, serving, soon

from rendezvous.access.auth import Grant, Role, add_key, new_grant_id, read_keys, sign
from rendezvous.client.channel import metadata, open_channel
from rendezvous.client.credential_files import ClientOptions, current_token
from rendezvous.values.events import Refused
from rendezvous.values.types import JobSpec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from served import Service

ONE = JobSpec("job", 1, 1, "train.py")
LONG_S = 60.0


def new_token(keys: Path) -> str:
    """Of a new key, the only one from now on."""
    part = keys.with_name("part")
    add_key(str(part))
    part.rename(keys)
    return sign(Grant(new_grant_id(), "*", Role.AGENT, 4e9), read_keys(str(keys))[-1])


async def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def until_refused(endpoint: str, options: ClientOptions) -> None:
    """Keys are looked at once a second at most."""
    async with open_channel(endpoint, options) as channel:
        call = channel.unary_unary("/rendezvous.v1.Operations/ListJobs")
        codes: list[grpc.StatusCode] = []
        while codes[-1:] != [grpc.StatusCode.UNAUTHENTICATED]:
            asked = call(b"", metadata=metadata(options), timeout=LONG_S)
            codes.append(await asked.code())
            assert codes[-1] in (grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED)
            await asyncio.sleep(0.1)


def test_a_token_is_read_anew_from_its_file(tmp_path: Path) -> None:
    token, options = tmp_path / "token", ClientOptions(token="old", token_file=str(tmp_path / "token"))
    assert current_token(options) == "old"  # the file is just being replaced
    token.write_text("new\n")
    assert current_token(options) == "new"
    token.write_text("no token\n")
    assert current_token(options) == "old"
    assert current_token(ClientOptions(token="mine")) == "mine"


def test_an_agent_that_was_refused_for_its_token_comes_back_with_the_next_one(tmp_path: Path) -> None:
    keys, token = tmp_path / "keys", tmp_path / "token"
    before = new_token(keys)
    token.write_text(before)
    options = ClientOptions(token=before, token_file=str(token))
    contact: list[bool] = []

    async def story(service: Service) -> None:
        cable = Cable(service.endpoint)
        async with cable as endpoint, agents(endpoint, ONE, ["a"], options) as (a,):
            await a.run()
            a.session.watch_contact(contact.append)
            after = new_token(keys)
            await until_refused(service.endpoint, ClientOptions(token=before))
            tried = cable.connections
            cable.cut()
            await until(lambda: cable.connections >= tried + 3)
            assert contact == [False]
            token.write_text(after)
            await until(lambda: contact == [False, True])

    with serving("--token-keys", str(keys)) as service:
        soon(story(service))


def test_an_agent_whose_token_is_not_from_a_file_is_refused_for_good(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    options = ClientOptions(token=new_token(keys))

    async def story(service: Service) -> None:
        cable = Cable(service.endpoint)
        async with cable as endpoint, agents(endpoint, ONE, ["a"], options) as (a,):
            await a.run()
            new_token(keys)
            await until_refused(service.endpoint, options)
            cable.cut()
            assert (await a.expect(Refused)).exit_code == 77

    with serving("--token-keys", str(keys)) as service:
        soon(story(service))


def test_a_certificate_that_is_away_for_a_moment_ends_no_job(tmp_path: Path) -> None:
    secret = Authority("CA").issue(
        {"commonName": "service", "dnsNames": ["service"], "usages": ["server auth"]}
    )
    for name, content in secret.items():
        (tmp_path / name).write_bytes(content)
    files = {"TLS_CERT": "tls.crt", "TLS_KEY": "tls.key"}
    env = {f"DDP_RENDEZVOUS_{name}": str(tmp_path / file) for name, file in files.items()}
    authority, away = tmp_path / "ca.crt", tmp_path / "away"
    options = ClientOptions(tls=True, ca_file=str(authority), server_name="service")
    contact: list[bool] = []

    async def story(service: Service) -> None:
        cable = Cable(service.endpoint)
        async with cable as endpoint, agents(endpoint, ONE, ["a"], options) as (a,):
            await a.run()
            a.session.watch_contact(contact.append)
            authority.rename(away)
            cable.cut()
            await until(lambda: contact == [False])
            away.rename(authority)
            await until(lambda: contact == [False, True])

    with serving(env=env) as service:
        soon(story(service))
