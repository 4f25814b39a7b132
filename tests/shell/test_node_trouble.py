"""Several agents of one job, and a node that falls silent, dies, comes, goes, or cannot be reached."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from typing import TYPE_CHECKING

import pytest
from launched import eventually
from ports import free_port
from served import SOON_S, serving, soon

from rendezvous.client.credential_files import ClientOptions
from rendezvous.client.session import connect
from rendezvous.values.contracts import VERSION
from rendezvous.values.events import AgentJoined, AgentStopped, Assigned, Ended, Stop, StoreOpened
from rendezvous.values.types import AgentId, JobSpec, NodeFacts, Recover, ScaleUp, StoreAddress

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from launched import Launch, Launched
    from served import Service

# Says which world it sees, then waits until the test lets it end.
WAIT = """
import os, time
generation, rank = os.environ["DDP_GENERATION"], os.environ["RANK"]
print("generation", generation, "rank", rank, "of", os.environ["WORLD_SIZE"], flush=True)
path = os.path.join(os.environ["THERE"], f"{generation}-{rank}")
with open(path + ".part", "w") as file:
    file.write(str(os.getpid()))
os.rename(path + ".part", path)
while not os.path.exists(os.environ["FINISH"]):
    time.sleep(0.02)
"""
# The same with torch: it works in step with its peers.
TRAIN = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
generation, rank = os.environ["DDP_GENERATION"], dist.get_rank()
assert int(total.item()) == dist.get_world_size() == int(os.environ["WORLD_SIZE"])
print("generation", generation, "rank", rank, "of", os.environ["WORLD_SIZE"], flush=True)
def there(name):
    return os.path.join(os.environ["THERE"], name)
with open(there(f"{generation}-{rank}.part"), "w") as file:
    file.write(str(os.getpid()))
os.rename(there(f"{generation}-{rank}.part"), there(f"{generation}-{rank}"))
over = torch.zeros(1)
while not over.item():
    over[0] = float(os.path.exists(os.environ["FINISH"]))
    try:
        dist.all_reduce(over)
    except RuntimeError:  # a peer is gone; it is for the agent to end this one
        time.sleep(600)
    time.sleep(0.02)
dist.destroy_process_group()
"""


LEASE_S = 4


@pytest.fixture
def service() -> Iterator[Service]:
    with serving() as service:
        yield service


class Job:
    """One job, at one service; its agents all run on this host, and see each other's files."""

    def __init__(
        self, launch: Launch, folder: Path, endpoint: str, torch: bool = False, lease_s: int = LEASE_S
    ) -> None:
        self._launch, self._endpoint = launch, endpoint
        self._lease = f"keep_alive_interval=1,keep_alive_max_attempt={lease_s}"
        self._torch = None if torch else ""
        self.script = folder / "train.py"
        self.script.write_text(TRAIN if torch else WAIT)
        self.end = folder / "finish"

    def node(self, *words: str, endpoint: str = "") -> Launched:
        where = (
            "--rendezvous",
            endpoint or self._endpoint,
            "--rdzv-id",
            "trouble",
            "--rdzv-conf",
            self._lease,
        )
        env = {"FINISH": str(self.end)}
        return self._launch(
            *where, "--nproc-per-node", "1", *words, str(self.script), env=env, fake_torch=self._torch
        )

    def finish(self, *nodes: Launched) -> None:
        self.end.touch()
        for node in nodes:
            assert node.wait() == 0, node.stderr()
            node.assert_nothing_left()


@pytest.fixture
def job(launch: Launch, tmp_path: Path, service: Service) -> Job:
    return Job(launch, tmp_path, service.endpoint)


def await_generation(nodes: tuple[Launched, ...], generation: int, ranks: int) -> None:
    def all_there() -> bool:
        found = {name for node in nodes for name in os.listdir(node.there)}
        return {f"{generation}-{rank}" for rank in range(ranks)} <= found

    what = "; ".join(node.stderr() for node in nodes)
    eventually(all_there, SOON_S, f"generation {generation} with {ranks} ranks: {what}")


def pids(node: Launched, generation: int) -> list[int]:
    return [int(path.read_text()) for path in node.there.glob(f"{generation}-?")]


# --- silence


def test_an_agent_that_sleeps_through_its_lease_comes_back_with_its_old_ranks_reaped(job: Job) -> None:
    first, second = nodes = (
        job.node("--nnodes", "2", "--max-restarts", "1"),
        job.node("--nnodes", "2", "--max-restarts", "1"),
    )
    await_generation(nodes, 1, 2)
    (old,) = pids(second, 1)
    second.send(signal.SIGSTOP)
    try:
        eventually(lambda: "was lost" in first.stderr(), what="given up")
        assert os.path.exists(f"/proc/{old}"), "nobody has told that node anything"
    finally:
        second.send(signal.SIGCONT)
    await_generation(nodes, 2, 2)
    assert not os.path.exists(f"/proc/{old}")
    job.finish(*nodes)


class Way:
    """The way from one agent to the service; it can be cut, and mended."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.rpartition(":")
        self._to = (host, int(port))
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._is_cut = False
        self._lock = threading.Lock()  # what is being let through is either cut, or not yet counted
        self.dialled = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        with self._lock:
            self._is_cut = True
            for end in self._open:
                with_reset(end)
            self._open.clear()

    def mend(self) -> None:
        self._is_cut = False

    def close(self) -> None:
        self._server.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            with self._lock:
                if self._is_cut:
                    with_reset(near)
                    continue
                far = socket.create_connection(self._to)
                self._open += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=pump, args=(source, sink), daemon=True).start()
                self.dialled += 1


def with_reset(end: socket.socket) -> None:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    try:
        end.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads it
    except OSError:
        pass
    end.close()


def pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(data)
    except OSError:
        pass


@pytest.fixture
def way(service: Service) -> Iterator[Way]:
    way = Way(service.endpoint)
    yield way
    way.close()


# --- spares, and worlds that change their size


def test_a_spare_says_so_and_takes_the_place_of_a_lost_node(job: Job) -> None:
    words = ("--nnodes", "2", "--spares", "1", "--max-restarts", "1")
    first, second = job.node(*words), job.node(*words)
    await_generation((first, second), 1, 2)
    spare = job.node(*words)
    eventually(lambda: "the node waits as a spare" in spare.stderr(), what="the spare says what it is")
    assert not pids(spare, 1)
    eventually(spare.zygote, what="its zygote is there")
    second.send(signal.SIGKILL)
    await_generation((first, spare), 2, 2)
    assert pids(spare, 2)
    job.finish(first, spare)
    assert "restarting with 1 spare node" in first.stderr()


def test_a_world_grows_by_who_comes_and_shrinks_by_who_goes(job: Job) -> None:
    words = ("--nnodes", "1:3", "--scale-up", "immediate", "--last-call", "0.2", "--max-restarts", "1")
    first = job.node(*words)
    await_generation((first,), 1, 1)
    second = job.node(*words)
    await_generation((first, second), 2, 2)
    second.send(signal.SIGTERM)
    assert second.wait() == 143
    await_generation((first,), 3, 1)
    job.finish(first)
    assert [line.partition("] ")[2] for line in first.stdout().splitlines()] == [
        "generation 1 rank 0 of 1",
        "generation 2 rank 0 of 2",
        "generation 3 rank 0 of 1",
    ]


# --- addresses


def test_nodes_that_cannot_talk_are_named_to_everybody(
    launch: Launch, tmp_path: Path, service: Service
) -> None:
    """The other node says its store is where nobody listens, as behind a firewall that refuses.

    No time limit may end the job first on a machine that is held up: neither a lease nor that of joining.
    """
    lease_s = int(SOON_S)
    job = Job(launch, tmp_path, service.endpoint, lease_s=lease_s)
    port = free_port()
    node = job.node("--nnodes", "2", "--join-timeout", str(lease_s))

    async def far_node() -> Ended:
        script = str(job.script)
        asked = JobSpec(
            "trouble",
            2,
            2,
            script,
            nproc="1",
            version=VERSION,
            join_timeout_s=lease_s,
            lease_s=lease_s,
            scale_up=ScaleUp.IMMEDIATE,
            recover=Recover.AUTO,
        )
        far, session = AgentId("far", "1"), connect([service.endpoint], AgentId("far", "1"), ClientOptions())
        facts = NodeFacts("far", "127.0.0.1", 1, node_rank=0)
        session.send(AgentJoined(far, asked, facts))
        while True:
            match await session.receive():
                case Assigned(assignment):
                    session.send(StoreOpened(far, assignment.generation, StoreAddress("127.0.0.1", port)))
                case Stop(generation):
                    session.send(AgentStopped(far, generation))
                case Ended() as ended:
                    await session.close()
                    return ended

    ended = soon(far_node())
    assert node.wait(SOON_S) == 75, node.stderr()
    assert ended.outcome.first_cause is not None
    reason = ended.outcome.first_cause.reason
    # The node name has a number if another test has a job of several nodes on this host.
    assert re.match(rf"{re.escape(socket.gethostname())}(#\d+)? ", reason), reason
    assert all(part in reason for part in ("far", f"127.0.0.1:{port}", "connection refused")), reason
    assert reason in node.stderr()
    assert not node.stdout(), "no rank was started"


@pytest.mark.nightly(instead="shell/test_two_nodes_join.py::test_two_agents_form_one_world")
@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_nodes_meet_on_an_interface_of_either_family(launch: Launch, tmp_path: Path, host: str) -> None:
    with serving(listen=f"{host}:0") as service:
        job = Job(launch, tmp_path, service.endpoint, torch=True)
        words = ("--nnodes", "2", "--interface", "lo") if host == "127.0.0.1" else ("--nnodes", "2")
        nodes = job.node(*words), job.node(*words)
        await_generation(nodes, 1, 2)
        job.finish(*nodes)


def test_an_interface_that_is_not_there_names_those_that_are(job: Job) -> None:
    node = job.node("--nnodes", "2", "--interface", "nosuch0")
    assert node.wait() == 2
    assert "--interface nosuch0: " in node.stderr()
    assert "lo" in node.stderr()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--local-addr", "192.0.2.1"), "does not belong to this machine. The job runs only on this machine"),
        (("--master-addr", "192.0.2.1", "--local-addr", "127.0.0.1"), "does not belong to this machine"),
        (("--local-addr", "fe80::1%nosuch"), "cannot resolve"),
    ],
    ids=lambda part: part[0][2:] if isinstance(part, tuple) else "",
)
def test_an_address_that_the_only_node_does_not_have_is_told_before_a_rank_starts(
    launch: Launch, words: tuple[str, ...], why: str
) -> None:
    node = launch("--no-warm-start", "--nproc-per-node", "1", *words, source="print('started')")
    assert node.wait() == 2, node.stderr()
    (line,) = node.stderr().splitlines()
    assert line.startswith(f"ddp-launch: error: {words[0]} {words[1]}: ")
    assert why in line
    assert not node.stdout()


def test_an_address_that_the_only_node_has_is_taken(launch: Launch) -> None:
    words = ("--master-addr", "localhost", "--local-addr", "192.0.2.1")  # the second is for other nodes
    node = launch("--no-warm-start", *words, source="import os\nprint(os.environ['MASTER_ADDR'])")
    assert node.wait() == 0, node.stderr()
    assert node.stdout().endswith("localhost\n")
