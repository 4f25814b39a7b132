"""Asks NCCL's own monitor (RAS) on this node for the state of the job's communicators, as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_ADDRESS, _ENABLED = "NCCL_RAS_ADDR", "NCCL_RAS_ENABLE"
_DEFAULT = ("localhost", 28028)
_MAX_BYTES = 16 << 20
_ASK = (
    b"CLIENT PROTOCOL 2\n",
    b"TIMEOUT 1\n",  # for each step on the way to a process that does not respond
    b"SET FORMAT json\n",
)


def address(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Where the monitor listens; None if it is switched off, or the setting is not an address."""
    if environ.get(_ENABLED) == "0":
        return None
    host, colon, port = environ.get(_ADDRESS, "").rpartition(":")
    if not colon:
        return _DEFAULT
    return (host.strip("[]"), int(port)) if port.isdecimal() and 0 < int(port) < 1 << 16 else None


async def ask(where: tuple[str, int], within_s: float) -> object:
    """Return the parsed answer; None if nothing answers in time, or NCCL is older than 2.28, which has no JSON."""
    try:
        async with asyncio.timeout(within_s):
            return await _ask(where)
    except (OSError, TimeoutError, ValueError, RecursionError, asyncio.IncompleteReadError):
        return None


async def _ask(where: tuple[str, int]) -> object:
    reader, writer = await asyncio.open_connection(*where)
    try:
        for line in _ASK:
            writer.write(line)
            answer = await reader.readline()
            if not answer.startswith((b"SERVER PROTOCOL", b"OK")):
                return None
        writer.write(b"STATUS\n")
        data = bytearray()
        while chunk := await reader.read(1 << 16):
            data += chunk
            if len(data) > _MAX_BYTES:
                return None
        return json.loads(data)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
