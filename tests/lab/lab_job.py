"""One training job in the lab: real agents on the hosts, a real service, and what everyone is seen to do.

The script (programs/train.py) trains until it is told to stop, so a scenario goes from condition to condition and
never guesses how long something takes. What the nodes share is a folder, as a cluster's file system would be.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab_host import SOON_S, eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from lab_host import Host, Process
    from lab_network import Lab

    Undisturbed = Callable[[int], list[float]]  # of the fixture of that name

PORT = 29400
SHORT_LEASE = "keep_alive_interval=1,keep_alive_max_attempt=4"
TRAIN = str(Path(__file__).parent / "programs" / "train.py")
LONG_S = 90.0  # on a busy machine; what is waited for comes within seconds
_SAID = "ddp-launch: "
# The scheduler of Linux shares the processors between sessions (sched_autogroup). Each rank has a session of its own.
# If all agents and the service were in the one of the tests, they would starve together as soon as many ranks start.
_APART = {"start_new_session": True}
_LOOK_EVERY_S = 0.05  # at whole files: more often would cost as much as the job
_OVER = object()
_BOX_ROWS = re.compile(r"^[│|] (.*) [│|]$", re.MULTILINE)
# Said or not as the machine is quick or busy, by one agent and not by the others: whom it waits for and how long; that
# a rank takes its time to end; how a node is, also before the start; which imports it has learned so far.
_IN_PASSING = re.compile(
    rf"{_SAID}(cannot reach the rendezvous |.*, for \d+ s so far$"
    r"|rank \d+ reported a communication error |(node|train-)\d+: |pre-flight: |the ranks start with \d+ modules? )"
)

_OWN_VICTIMS = re.compile(r"; \d+ other ranks? lost a connection: see the logs$")


def to_the_point(text: str) -> list[str]:
    """The lines but for what agents say in passing."""
    return [line for line in text.splitlines() if not _IN_PASSING.match(line)]


def environment() -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("DDP_", "PET_", "SLURM_", "PYTEST"))}
    return env | {"DDP_RENDEZVOUS_INSECURE": "1", "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}


@dataclass(frozen=True)
class Rank:
    rank: int
    generation: int
    host: str
    pid: int  # on its host
    world_size: int
    node_rank: int
    store: str  # where its generation met


@dataclass(frozen=True)
class Point:
    step: int
    loss: float
    generation: int


class Agent:
    """One `ddp-launch` command on one host."""

    def __init__(self, host: Host, process: Process, out: Path) -> None:
        self.host, self.process, self._out = host, process, out

    def stderr(self) -> str:
        return self._out.read_text(errors="replace")

    def said(self) -> list[str]:
        """Its own lines: what was decided, with the reason."""
        return [line for line in to_the_point(self.stderr()) if line.startswith(_SAID)]

    def first_cause(self) -> str:
        """The head of the box with which a failed job ends; "" without one."""
        rows = [row.strip() for row in _BOX_ROWS.findall(self.stderr())]
        return " ".join(rows[: rows.index("")]) if "" in rows else ""


class Service:
    """ddp-rendezvous on a host; what it decided survives it, on the disk of the host."""

    def __init__(self, host: Host, folder: Path) -> None:
        self.host, self._folder = host, folder
        self.start()

    @property
    def endpoint(self) -> str:
        return f"{self.host.name}:{PORT}"

    def start(self) -> None:
        log = self._folder / "service"
        before = log.stat().st_size if log.exists() else 0
        command = [sys.executable, "-m", "rendezvous.main", "serve", "--insecure", "--listen", f"[::]:{PORT}"]
        command += ["--store", f"file:{self._folder / 'service.db'}"]
        with log.open("ab") as out:
            self.process = self.host.start(*command, env=environment(), stdout=out, stderr=out, **_APART)
        eventually(lambda: b"serving at" in log.read_bytes()[before:], what="the service serves")

    def kill(self) -> None:
        self.process.send(signal.SIGKILL)
        self.process.wait()


class Job:
    """`words`: options of ddp-launch that are the same on every node."""

    script = TRAIN
    ranks_per_node = 1
    patience_s = LONG_S

    def __init__(
        self, lab: Lab, folder: Path, rendezvous: str, *words: str, lease: str = SHORT_LEASE
    ) -> None:
        self.lab, self.folder = lab, folder / "shared"
        for name in ("ranks", "orders"):
            (self.folder / name).mkdir(parents=True)
        place = ("--rendezvous", rendezvous) if rendezvous else ()
        place += ("--rdzv-conf", lease) if lease else ()
        self._words = (*place, "--rdzv-id", "lab", "--nproc-per-node", str(self.ranks_per_node), *words)
        self.agents: list[Agent] = []

    # --- what is done to it ------------------------------------------------------------------------

    def start(self, *hosts: Host) -> list[Agent]:
        return [self._start(host) for host in hosts]

    def _environment(self, _host: Host) -> dict[str, str]:
        return environment()

    def _start(self, host: Host) -> Agent:
        out = self.folder.parent / f"agent-{len(self.agents)}-{host.name}"
        command = (sys.executable, "-m", "launcher", *self._words, self.script, str(self.folder))
        with out.open("wb") as file:
            streams: dict[str, Any] = {"stdout": file, "stderr": file}
            process = host.start(*command, env=self._environment(host), **streams, **_APART)
        agent = Agent(host, process, out)
        self.agents.append(agent)
        return agent

    def order(self, rank: int, what: str) -> None:
        part = self.folder / "orders" / f".{rank}"
        part.write_text(what)
        part.rename(self.folder / "orders" / str(rank))

    def kill(self, rank: Rank) -> None:
        self._host(rank.host).run("kill", "-KILL", str(rank.pid))

    def finish(self, *agents: Agent) -> list[int]:
        """Tells the job to end well: the exit codes of these agents, of all without any."""
        (self.folder / "finish").touch()
        return self.exit_codes(*agents)

    def exit_codes(self, *agents: Agent) -> list[int]:
        chosen = agents or tuple(self.agents)
        self._until(lambda: all(agent.process.poll() is not None for agent in chosen), "the agents ended")
        return [agent.process.wait() for agent in chosen]

    # --- what is seen of it ------------------------------------------------------------------------

    def curve(self) -> list[Point]:
        with contextlib.suppress(FileNotFoundError):
            rows = [line.split() for line in (self.folder / "curve").read_text().splitlines()]
            return [Point(int(row[0]), float.fromhex(row[1]), int(row[2])) for row in rows if len(row) == 3]
        return []

    def step(self) -> int:
        points = self.curve()
        return points[-1].step if points else 0

    def ranks(self) -> dict[int, Rank]:
        """Of the newest generation that has met completely."""
        found: dict[int, dict[int, Rank]] = {}
        for path in (self.folder / "ranks").glob("[0-9]*-*"):
            generation, rank = map(int, path.name.split("-"))
            told = json.loads(path.read_text())
            who = (told["host"], told["pid"], told["world_size"])
            where = (int(told["GROUP_RANK"]), told["MASTER_ADDR"])
            found.setdefault(generation, {})[rank] = Rank(rank, generation, *who, *where)
        met = {g: ranks for g, ranks in found.items() if len(ranks) == ranks[min(ranks)].world_size}
        return met[max(met)] if met else {}

    def runs(self, rank: Rank) -> bool:
        return str(rank.pid) in self._host(rank.host).run("ls", "/proc").split()

    def host_of(self, rank: int) -> str:
        return self.ranks()[rank].host

    @property
    def generation(self) -> int:
        return next((rank.generation for rank in self.ranks().values()), 0)

    def await_steps(self, more: int = 5) -> None:
        """So many steps after those of now."""
        target = self.step() + more
        self._until(lambda: self.step() >= target, f"step {target} was reached")

    def await_world(self, size: int, after: int = 0) -> dict[int, Rank]:
        """A generation later than `after`, of `size` ranks, that trains."""

        def trains() -> dict[int, Rank]:
            ranks = self.ranks()
            here = next((rank.generation for rank in ranks.values()), 0)
            points = self.curve()
            fits = len(ranks) == size and here > after and points and points[-1].generation == here
            return ranks if fits else {}

        found: dict[int, Rank] = self._until(trains, f"{size} ranks train in a generation after {after}")
        return found

    def await_healthy(self, size: int) -> None:
        """Every agent that runs is part of it: the newest generation has this size, and trains on for a while."""

        def of_all() -> bool:
            ranks = self.ranks()
            running = {agent.host.name for agent in self.agents if agent.process.poll() is None}
            return len(ranks) == size and {rank.host for rank in ranks.values()} == running

        seen = self.generation, self.step()

        def steady() -> bool:
            nonlocal seen
            now = self.generation, self.step()
            if now[0] != seen[0] or not of_all():
                seen = now
            return now[1] >= seen[1] + 10

        self._until(steady, f"{size} ranks train steadily")

    def story(self, *agents: Agent) -> list[str]:
        """What was decided and why, as all of these agents told it: the same lines in the same order."""
        told = [
            # One agent tells the goodput. Each counts those of its own ranks whose last output came in time.
            [
                _OWN_VICTIMS.sub("", line)
                for line in agent.said()
                if not line.startswith("ddp-launch: goodput")
            ]
            for agent in agents or self.agents
        ]
        assert all(lines == told[0] for lines in told), f"{told}\n{self}"
        return told[0]

    def reason(self, *agents: Agent) -> str:
        """Of the one restart, as these agents told it last.

        The report of a mere consequence may have come first. The story is told anew, too, where a node comes back
        before the others have stopped: the same cause, and another way to go on.
        """
        *before, last = self.story(*agents)
        cause = last.partition("; ")[0] + "; "
        assert all(
            " lost the connection to its peers; " in line or line.startswith(cause) for line in before
        ), (before, last)
        return last

    def assert_curve(self, undisturbed: Undisturbed) -> None:
        """Every step was taken, and the loss of each is the one of a run that nothing happens to."""
        points = self.curve()
        last = max(point.step for point in points)
        losses = undisturbed(last)
        assert {point.step for point in points} == set(range(1, last + 1))
        for point in points:
            expected = losses[point.step - 1]
            # Sums in another order differ in the last bit, and training blows that up tenfold in some 250 steps. A
            # step left out or taken twice shows at once, in the first digits.
            close = min(1e-6, 1e-12 * 10 ** (point.step / 250)) * abs(expected)
            assert abs(point.loss - expected) <= close, f"{point}, undisturbed {expected}"

    def assert_nothing_left(self) -> None:
        def left() -> dict[str, object]:
            return {host.name: host.processes() for host in self._hosts() if host.processes()}

        eventually(lambda: not left(), SOON_S, f"no process is left: {left()}\n{self}")
        for host in self._hosts():
            assert not host.is_on or not host.leftovers(), host.leftovers()

    # ------------------------------------------------------------------------------------------------

    def _hosts(self) -> list[Host]:
        return list({agent.host.name: agent.host for agent in self.agents}.values())

    def _host(self, name: str) -> Host:
        return next(host for host in self.lab.hosts if host.name == name)

    def _until(self, condition: Callable[[], object], what: str) -> object:
        """Or until there is nobody left who could bring it about."""

        def so_or_over() -> object:
            over = all(agent.process.poll() is not None for agent in self.agents)
            return condition() or (over and _OVER)

        try:
            found = eventually(so_or_over, self.patience_s, what, _LOOK_EVERY_S)
            assert found is not _OVER, f"all agents ended before {what}"
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self}") from None
        return found

    def __str__(self) -> str:
        """All that is known, for a test that failed."""
        told = [f"step {self.step()}, generation {self.generation}, ranks {list(self.ranks().values())}"]
        told += [f"--- agent on {a.host}: {a.process.poll()}\n{a.stderr()[-3000:]}" for a in self.agents]
        service = self.folder.parent / "service"
        return "\n".join([*told, "--- service", service.read_text()[-3000:] if service.exists() else "none"])
