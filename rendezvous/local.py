"""Where ddpctl finds the jobs of this user on this machine that have no service: one pair of sockets per job.

A job on one machine runs its rendezvous inside its agent, without gRPC. The agent only listens on a small Unix socket.
The first connection to it makes the agent load gRPC, and serve the calls for tools on a second socket. Both are in a
folder that only this user can access, so there are no tokens.

The folder is in $XDG_RUNTIME_DIR, or in /tmp if that is not set or cannot be used. Both sides choose it by the same
rule, so without the name of a job ddpctl finds the jobs of its own environment: those of another one on a shared
account do not show up here. A job that is named is found in either folder, because a batch system may start it
without the variable that a login sets.
"""

from __future__ import annotations

import asyncio
import os
import re
import stat
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rendezvous.embedded import EmbeddedRendezvous

_WAKE, _CALLS = ".job", ".grpc"
_SHARED = "/tmp"
_LONGEST = 100  # of the path of a Unix socket
_DIGITS = 24  # of the digest that replaces an odd name
_READY = b"ready\n"
_WAKE_S = 10.0


def _folders() -> Iterator[str]:
    for base in (os.environ.get("XDG_RUNTIME_DIR", ""), _SHARED):
        if base and os.path.isdir(base):
            yield os.path.join(base, f"ddp-launch-jobs-{os.getuid()}")


def _is_ours(folder: str) -> bool:
    """Whether only this user can write there."""
    with suppress(OSError):
        found = os.lstat(folder)
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return False


def _is_usable(folder: str) -> bool:
    """Whether an agent can listen in it: it is ours, or can be made, and its name leaves room for a socket."""
    if len(os.fsencode(folder)) + 1 + _DIGITS + len(_CALLS) > _LONGEST:
        return False
    can_make = not os.path.lexists(folder) and os.access(os.path.dirname(folder), os.W_OK | os.X_OK)
    return can_make or _is_ours(folder)


def _path(folder: str, job_id: str) -> str:
    """The path without its ending. A digest replaces a name that is too long or odd."""
    path = os.path.join(folder, job_id)
    if len(os.fsencode(path)) + len(_CALLS) > _LONGEST or not re.fullmatch(
        r"\w[A-Za-z0-9_.-]*", job_id, re.ASCII
    ):
        import hashlib

        path = os.path.join(folder, hashlib.sha256(job_id.encode()).hexdigest()[:_DIGITS])
    return path


# --- ddpctl ----------------------------------------------------------------------------------------------


def endpoint_of(job_id: str) -> str:
    """The endpoint of a job of this user on this machine, in either folder; empty if it has none."""
    paths = (_path(folder, job_id) for folder in _folders() if _is_ours(folder))
    return next((f"unix:{path}{_CALLS}" for path in paths if os.path.exists(path + _WAKE)), "")


def endpoints() -> list[str]:
    """The endpoints of the jobs whose agents have the environment of this process."""
    folder = next(filter(_is_usable, _folders()), "")
    names = sorted(os.listdir(folder)) if folder and os.path.isdir(folder) else []
    return [
        f"unix:{os.path.join(folder, name.removesuffix(_WAKE))}{_CALLS}"
        for name in names
        if name.endswith(_WAKE)
    ]


def names() -> list[str]:
    """The names of these jobs, for a person; of an odd name, its digest."""
    return [os.path.basename(endpoint).removesuffix(_CALLS) for endpoint in endpoints()]


async def wake(endpoint: str) -> bool:
    """Have the agent serve calls. Return False if it is gone; what a killed agent has left is removed."""
    path = endpoint.removeprefix("unix:").removesuffix(_CALLS)
    try:
        async with asyncio.timeout(_WAKE_S):
            reader, writer = await asyncio.open_unix_connection(path + _WAKE)
            answer = await reader.readline()
            writer.close()
    except ConnectionRefusedError:
        for ending in (_WAKE, _CALLS):
            with suppress(OSError):
                os.unlink(path + ending)
        return False
    except (OSError, TimeoutError):
        return False
    return answer == _READY


# --- the agent -------------------------------------------------------------------------------------------


async def offer(job: EmbeddedRendezvous) -> Callable[[], Awaitable[None]]:
    """Let ddpctl reach the job until the returned function is called. Without a folder for it, nothing happens."""
    for path in _places(job.job_id):
        with suppress(OSError):
            door = _Door(job, path)
            await door.open()
            return door.close
    return _nothing


def _places(job_id: str) -> Iterator[str]:
    for folder in filter(_is_usable, _folders()):
        with suppress(OSError):
            os.mkdir(folder, 0o700)
        if _is_ours(folder):
            yield _path(folder, job_id)


async def _nothing() -> None:
    pass


class _Door:
    def __init__(self, job: EmbeddedRendezvous, path: str) -> None:
        self._job, self._path = job, path
        self._server: asyncio.Server | None = None
        self._stop: Callable[[], Awaitable[None]] | None = None
        self._starting = asyncio.Lock()

    async def open(self) -> None:
        self._server = await asyncio.start_unix_server(self._answer, self._path + _WAKE)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        del reader
        with suppress(Exception):  # a tool must not end the job
            async with self._starting:
                if self._stop is None:
                    self._stop = await self._serve()
            writer.write(_READY)
            await writer.drain()
        writer.close()

    async def _serve(self) -> Callable[[], Awaitable[None]]:
        service = await asyncio.to_thread(__import__, "rendezvous.local_calls", fromlist=["serve"])
        stop: Callable[[], Awaitable[None]] = await service.serve(self._job, f"unix:{self._path}{_CALLS}")
        return stop

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._stop is not None:
            await self._stop()
        for ending in (_WAKE, _CALLS):
            with suppress(OSError):
                os.unlink(self._path + ending)
