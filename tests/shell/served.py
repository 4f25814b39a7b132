"""A real service in a process of its own, and agents that talk to it over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
from launched import hail

from rendezvous.client.credential_files import ClientOptions
from rendezvous.client.session import connect
from rendezvous.values.events import AgentJoined, Assigned, StoreAt, StoreOpened
from rendezvous.values.types import AgentId, Assignment, JobSpec, NodeFacts, StoreAddress

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from rendezvous.client.session import Session

T = TypeVar("T")
START_S = 60.0  # on a machine that others use as well; what is waited for comes within a second
SOON_S = 60.0
LOST_ANSWER = "Internal error from Core"  # gRPC's client, when the answer overtakes what it still writes


class Service:
    def __init__(self, *arguments: str, env: dict[str, str] | None = None, descriptors: int = 0) -> None:
        command = [sys.executable, "-m", "rendezvous.main", "serve", *arguments]
        if descriptors:  # also the hard limit, to which a service raises its own
            command = ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh", *command]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("DDP_RENDEZVOUS")}
        self._process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, errors="backslashreplace", env=inherited | (env or {})
        )
        self.pid = self._process.pid
        self.log: list[str] = []
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._collecting = threading.Thread(target=self._collect, daemon=True)
        self._collecting.start()

    def _collect(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self.log.append(line)
                self._lines.put(line)
        self._lines.put(None)

    def await_line(self, pattern: str, timeout_s: float = START_S) -> re.Match[str]:
        while True:
            line = self._lines.get(timeout=timeout_s)
            assert line is not None, "".join(self.log)
            if found := re.search(pattern, line):
                return found

    def await_endpoint(self) -> str:
        self.endpoint = self.await_line(r"serving at ([^,;]+)")[1]
        return self.endpoint

    def hail(self, signum: signal.Signals) -> int:
        hail(self._process, signum)
        return self.wait()

    def end(self, signum: signal.Signals = signal.SIGTERM) -> int:
        self._process.send_signal(signum)
        return self.wait()

    def wait(self) -> int:
        """Its last words are in `log` then, too."""
        code = self._process.wait(timeout=START_S)
        self._collecting.join(SOON_S)
        return code

    @property
    def resident(self) -> int:
        return int(psutil.Process(self.pid).memory_info().rss)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def serving(
    *arguments: str, listen: str = "127.0.0.1:0", env: dict[str, str] | None = None
) -> Iterator[Service]:
    service = Service("--listen", listen, *arguments, env=env)
    try:
        service.await_endpoint()
        yield service
    finally:
        service.close()


def soon(coroutine: Any) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(100.0):
            return await coroutine

    return asyncio.run(bounded())


class Agent:
    """Speaks as a launcher's agent does, and runs no ranks."""

    def __init__(
        self, session: Session, agent: AgentId, spec: JobSpec, nproc: int = 1, host: str | None = None
    ) -> None:
        self.session, self.id = session, agent
        self.assignment: Assignment | None = None
        session.send(AgentJoined(agent, spec, NodeFacts(host or agent.node, "127.0.0.1", nproc)))

    async def expect(self, kind: type[T]) -> T:
        """Passes over everything else."""
        async with asyncio.timeout(SOON_S):
            while True:
                message: Any = await self.session.receive()
                if isinstance(message, Assigned):
                    self.assignment = message.assignment
                if isinstance(message, kind):
                    return message

    async def run(self) -> int:
        """Until ranks may run: the generation."""
        assigned = (await self.expect(Assigned)).assignment
        if assigned.node_rank == 0:
            opened = StoreAddress("127.0.0.1", 1234)
            self.session.send(StoreOpened(self.id, assigned.generation, opened))
        await self.expect(StoreAt)
        return assigned.generation


@contextlib.asynccontextmanager
async def agents(
    endpoints: str | list[str],
    spec: JobSpec,
    nodes: list[str],
    options: ClientOptions | None = None,
    life: str = "1",
) -> AsyncIterator[list[Agent]]:
    where = [endpoints] if isinstance(endpoints, str) else endpoints
    ids = [AgentId(node, life) for node in nodes]
    found = [Agent(connect(where, agent, options or ClientOptions()), agent, spec) for agent in ids]
    try:
        yield found
    finally:
        await asyncio.gather(*(agent.session.close() for agent in found))


class Cable:
    """A TCP connection between agents and service that can be cut."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.rpartition(":")
        self._to = (host, int(port))
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thawed = asyncio.Event()
        self._thawed.set()
        self.connections = 0

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        self._thawed.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    def freeze(self) -> None:
        """From now on nothing comes through, and nothing says so."""
        self._thawed.clear()

    def thaw(self) -> None:
        self._thawed.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._open.add(writer)  # at once: a cut while the other end is dialled is one of this connection, too
        there_reader, there_writer = await asyncio.open_connection(*self._to)
        if writer.transport.is_closing():
            there_writer.transport.abort()
            return
        for source, sink in ((reader, there_writer), (there_reader, writer)):
            self._open.add(sink)
            task = asyncio.get_running_loop().create_task(self._pump(source, sink))
            self._tasks.add(task)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                await self._thawed.wait()
                sink.write(data)
                await sink.drain()
        self._open.discard(sink)
        sink.transport.abort()


@contextlib.asynccontextmanager
async def raw_stream(endpoint: str) -> AsyncIterator[Any]:
    """A stream whose messages are whatever bytes a test likes."""
    from rendezvous.client.channel import open_channel

    async with open_channel(endpoint, ClientOptions()) as channel:
        call: Any = channel.stream_stream("/rendezvous.v1.Agents/Attend")()
        try:
            yield call
        finally:
            call.cancel()


def join_bytes(spec: JobSpec, node: str) -> bytes:
    from rendezvous.codec import from_agent_bytes

    agent = AgentId(node, "1")
    return from_agent_bytes(AgentJoined(agent, spec, NodeFacts(node, "127.0.0.1", 1)))
