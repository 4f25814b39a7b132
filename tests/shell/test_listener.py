"""Connections of strangers to the HTTP ports: how many, for how long, and what users notice of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import ssl
from typing import TYPE_CHECKING

import pytest
from authority import Authority
from served import soon

from rendezvous.service import listener
from rendezvous.service.listener import Listener, Places, listen_at

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Echo(asyncio.Protocol):
    """Answers each line with the same line."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


class Port:
    def __init__(self, places: Places, tls: ssl.SSLContext | None = None) -> None:
        self.crowded: list[str] = []
        self.listener = Listener(Echo, self.crowded.append, tls, places)
        self.number = 0
        self._clients = contextlib.AsyncExitStack()

    async def connect(self) -> Pair:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.number)
        self._clients.callback(writer.close)
        return reader, writer

    async def close(self) -> None:
        await self._clients.aclose()
        await self.listener.close()


@contextlib.asynccontextmanager
async def port(places: Places, tls: ssl.SSLContext | None = None) -> AsyncIterator[Port]:
    found = Port(places, tls)
    (sock,) = listen_at("127.0.0.1", 0)
    found.number = sock.getsockname()[1]
    found.listener.start([sock])
    try:
        yield found
    finally:
        await found.close()


async def echoes(client: Pair) -> bool:
    """Whether the other side still answers."""
    reader, writer = client
    try:
        writer.write(b"x\n")
        return await reader.readline() == b"x\n"
    except OSError:
        return False


async def name_of(port: Port, client: Pair, name: str) -> bool:
    """The connection shows a session of `name`."""
    assert await echoes(client)
    return port.listener.admit(*client[1].get_extra_info("sockname"), name)


def test_the_oldest_stranger_makes_room_for_the_next_and_a_known_connection_does_not() -> None:
    async def story() -> None:
        async with port(Places(strangers=4)) as found:
            user = await found.connect()
            assert await name_of(found, user, "user")
            strangers = [await found.connect() for _ in range(40)]
            assert await echoes(strangers[-1])
            assert [await echoes(each) for each in strangers[-5:]] == [False, True, True, True, True]
            assert await echoes(user)
            assert found.crowded == ["127.0.0.1"] * 36

    soon(story())


def test_a_stranger_ends_in_time_and_a_known_connection_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "STRANGER_S", 0.3)

    async def story() -> None:
        async with port(Places()) as found:
            user, stranger = await found.connect(), await found.connect()
            assert await name_of(found, user, "user")
            assert await stranger[0].read() == b""  # although it is not the oldest
            assert await echoes(user)
            assert found.crowded == []

    soon(story())


def test_a_stranger_that_never_begins_its_tls_handshake_ends_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "STRANGER_S", 0.3)
    certificate, key = Authority(tmp_path, "ca").issue("localhost")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)

    async def story() -> None:
        async with port(Places(), tls) as found:
            assert await (await found.connect())[0].read() == b""

    soon(story())


def test_one_name_has_few_of_the_known_places() -> None:
    async def story() -> None:
        async with port(Places(of_a_name=2)) as found:
            clients = [await found.connect() for _ in range(4)]
            assert [await name_of(found, each, "greedy") for each in clients[:3]] == [True, True, False]
            assert await name_of(found, clients[3], "other")
            assert await name_of(found, clients[0], "greedy"), "it keeps its place"
            clients[1][1].close()
            await clients[1][1].wait_closed()
            while not await name_of(found, clients[2], "greedy"):  # noqa: ASYNC110  # until the other side knows
                await asyncio.sleep(0)

    soon(story())


def test_without_descriptors_the_loop_waits_and_logs_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_AFTER_ERROR_S", 0.05)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def story() -> None:
        async with port(Places()) as found:
            client = socket.create_connection(("127.0.0.1", found.number))
            resource.setrlimit(resource.RLIMIT_NOFILE, (1, before[1]))
            try:
                await asyncio.sleep(0.5)  # ten attempts
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, before)
            pair = await asyncio.open_connection(sock=client)
            assert await echoes(pair)
            pair[1].close()

    with caplog.at_level(logging.INFO):
        soon(story())
    told = [record.getMessage() for record in caplog.records]
    assert told == ["cannot accept an HTTP connection: Too many open files; trying again"]


@pytest.mark.parametrize("descriptors", [64, 600, 1024, 1 << 20])
def test_the_places_are_a_part_of_the_descriptors(descriptors: int) -> None:
    places = Places().within(descriptors)
    assert places.strangers + places.known <= max(16, descriptors // 8)
    assert places.of_an_address <= places.strangers
    assert places.of_a_name <= places.known
    if descriptors > 10_000:
        assert places == Places()


def test_a_name_with_several_addresses_is_served_at_each() -> None:
    (free,) = listen_at("127.0.0.1", 0)
    number = free.getsockname()[1]
    free.close()
    opened = listen_at("localhost", number)
    expected = {found[4][0] for found in socket.getaddrinfo("localhost", number, type=socket.SOCK_STREAM)}
    assert {sock.getsockname()[0] for sock in opened} <= expected
    for sock in opened:
        sock.close()
    with pytest.raises(OSError, match=os.strerror(99) + "|not known|No address"):
        listen_at("192.0.2.1", number)
