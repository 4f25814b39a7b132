"""The address of the rendezvous belongs to another program: the user learns that, and not how gRPC failed."""

from __future__ import annotations

import asyncio

import pytest
from served import soon

from rendezvous.client.channel import probe_tls
from rendezvous.client.credential_files import ClientOptions


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "another program"),
        (b"<!DOCTYPE HTML><html>", "another program"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "another program"),
        (bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)), ""),  # empty settings: the first frame of an HTTP/2 server
        (b"", ""),  # it may be busy
    ],
)
def test_a_program_that_is_not_a_rendezvous_is_called_that(answer: bytes, named: str) -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(64)
        writer.write(answer)
        writer.close()

    async def story() -> None:
        server = await asyncio.start_server(reply, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            found = await probe_tls(f"127.0.0.1:{port}", ClientOptions())
        assert bool(found) == bool(named)
        assert named in found

    soon(story())
