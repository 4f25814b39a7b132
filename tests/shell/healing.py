"""Ranks that heal: small scripts that speak to the agent as the guard of a rank inside `State.run` does, without torch.

A rank writes one line per generation into the file `ranks`: generation, rank, local rank, pid, what it joins, the port
of the store, its number of children. It ends when the file `over` exists, and parks when it is paused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from launched import FAMILY, eventually

if TYPE_CHECKING:
    from pathlib import Path

    from launched import Launched

RANK = """
import fcntl, json, os, select, signal, socket, struct, sys, termios, time

THERE, E = os.environ["THERE"], os.environ

class Rank:
    def __init__(self):
        self.line = socket.socket(socket.AF_UNIX)
        self.line.connect(E["DDP_GUARD"])
        self.rest = b""
        self.parked = False

    def say(self, **message):
        self.line.sendall(json.dumps(message).encode() + b"\\n")

    def hello(self):
        self.parked = False
        self.say(hello=int(E["RANK"]), generation=int(E["DDP_GENERATION"]), pid=os.getpid(), heals=True)
        self.await_reader()
        self.note()  # a death that comes now is reported after this

    def await_reader(self):
        while struct.unpack("i", fcntl.ioctl(self.line, termios.TIOCOUTQ, b"    "))[0]:
            time.sleep(0.001)

    def note(self):
        row = [E[n] for n in ("DDP_GENERATION", "RANK", "LOCAL_RANK")]
        row += [str(os.getpid()), E.get("DDP_JOINS") or "-", E["MASTER_PORT"], E["WORLD_SIZE"]]
        with open(os.path.join(THERE, "ranks"), "a") as file:
            file.write(" ".join(row) + f" {time.monotonic():.6f}\\n")

    def heard(self, message):
        if "pause" in message:
            self.park()
        elif "continue" in message:
            assert self.parked
            os.environ.update(message["continue"]["env"])
            assert E["DDP_GENERATION"] == str(message["continue"]["generation"])
            self.hello()

    def park(self):
        if not self.parked:
            self.parked = True
            self.say(parked={"generation": int(E["DDP_GENERATION"])})

    def serve(self):
        while self.parked or not os.path.exists(os.path.join(THERE, "over")):
            if not select.select([self.line], [], [], 0.01)[0]:
                continue
            data = self.line.recv(65536)
            if not data:
                sys.exit(9)
            *lines, self.rest = (self.rest + data).split(b"\\n")
            for line in lines:
                self.heard(json.loads(line))

rank = Rank()
"""
TRAINS = RANK + "rank.hello()\nrank.serve()\n"
WITH_CHILDREN = FAMILY.replace("forking)):", "stay)):") + RANK + "family()\nrank.hello()\nrank.serve()\n"
# Rank 1 stays in its collective, as one in native code does.
ONE_IS_STUCK = RANK + "rank.hello()\nif E['RANK'] == '1': rank.park = lambda: None\nrank.serve()\n"
PRINTS = (
    RANK
    + """
class Prints(Rank):
    def note(self):
        print("generation", E["DDP_GENERATION"], "rank", E["RANK"], flush=True)
        super().note()
rank.line.close()
rank = Prints()
rank.hello()
rank.serve()
"""
)


class Row(NamedTuple):
    generation: int
    rank: int
    local_rank: int
    pid: int
    joins: bool
    port: str
    world: int
    at: float  # on the monotonic clock


class World(NamedTuple):
    """One generation, by rank."""

    ranks: dict[int, Row]

    def pids(self) -> dict[int, int]:
        return {rank: row.pid for rank, row in self.ranks.items()}


def rows(folder: Path) -> list[Row]:
    path = folder / "ranks"
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        g, rank, local_rank, pid, joins, port, world, at = line.split()
        found.append(
            Row(int(g), int(rank), int(local_rank), int(pid), joins == "1", port, int(world), float(at))
        )
    return found


def world(folder: Path, generation: int, size: int, job: Launched | None = None) -> World:
    """Wait until all ranks of this generation run."""

    def there() -> World | None:
        assert job is None or job.agent.poll() is None, job.stderr()
        ranks = {row.rank: row for row in rows(folder) if row.generation == generation}
        return World(ranks) if len(ranks) == size else None

    try:
        found: World = eventually(there, what=f"{size} ranks in generation {generation}")
    except AssertionError as error:
        raise AssertionError(f"{error}: {rows(folder)}; {job and job.circumstances()}") from None
    return found


def end(*jobs: Launched) -> None:
    """Let the ranks of these jobs, which have one folder, finish."""
    (jobs[0].there / "over").touch()
    for job in jobs:
        assert job.wait() == 0, job.stderr()
        job.assert_nothing_left()
