"""Kills ranks of a job that heals in place, one after the other, at random instants, and counts what that leaves.

Rank 0, rank 1 and both at once are killed at any time: mostly while all train, sometimes while the job heals. Rank 2
keeps its process for `WITNESS_DIES_EVERY` kills: it shows what so many heals leave in a survivor.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from launched import Launched
from soak_board import RANKS, Board

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
PROGRAM = HERE / "programs" / "soaked.py"
WITNESS = RANKS - 1
PROCESSES = RANKS + 3  # with the agent, the zygote and the keeper of the store
WITNESS_DIES_EVERY = 250
_TRAINS_FOR_S = 0.06  # at most, from the first step of all to the next kill
_HEALS_WITHIN_S = 0.4
_AT_ONCE = 0.2  # of all kills: they do not wait until all train again
_AT_ONCE_IN_A_ROW = 2  # the fifth failure without a step ends a job
_LOOK_EVERY_S = 0.001
_LOOK_AGAIN_S = 0.05
_SETTLES_WITHIN_S = 60.0


class Held(NamedTuple):
    """What one process holds."""

    descriptors: int
    memory: int  # in bytes, without files


@dataclass(frozen=True)
class Sight:
    """What a job holds while all ranks train."""

    kills: int
    processes: int
    agent: Held
    zygote: Held
    witness: Held
    witness_heals: int  # since it was started
    files: int  # in memory and in temporary folders, without the logs

    def is_no_more_than(self, first: Sight) -> bool:
        """No more is held than at first. It may be less: something may have been there for a moment only."""
        return (
            self.processes <= first.processes
            and self.files <= first.files
            and self.agent.descriptors <= first.agent.descriptors
            and self.zygote.descriptors <= first.zygote.descriptors
        )


@dataclass
class Soak:
    folder: Path
    backend: str = "shm"
    wrap: str = "ours"
    seed: int = 0
    look_every: int = 10
    sights: list[Sight] = field(default_factory=list)
    healed_s: list[float] = field(default_factory=list)
    kills: int = 0  # of ranks
    pairs: int = 0

    def play(self, kills: int) -> None:
        """`kills` instants at which one rank or two are killed."""
        words = ["--nproc-per-node", str(RANKS), "--recover", "in-place", "--max-restarts", "9999"]
        words += ["--preload", "torch._dynamo", "--crash-loop", "3/1ms,5/step", str(PROGRAM)]
        plan = {"backend": self.backend, "wrap": self.wrap, "steps": 0, "pace": 0.003, "beside": str(HERE)}
        self.job = Launched(
            self.folder / "job",
            *words,
            env={
                "PLAN": json.dumps(plan),
                "OMP_NUM_THREADS": "1",
                "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"),
            },
        )
        self.board = Board(self.job.there / "board")
        chance = random.Random(self.seed)
        try:
            self._kill_all(kills, chance)
            (self.job.there / "over").touch()
            assert self.job.wait() == 0, self.job.stderr()[-4000:]
            self.job.assert_nothing_left()
        finally:
            self.job.clean_up()

    def _kill_all(self, kills: int, chance: random.Random) -> None:
        generation, since_witness, in_a_row = 0, 0, 0
        for number in range(kills):
            at_once = number > 0 and in_a_row < _AT_ONCE_IN_A_ROW and chance.random() < _AT_ONCE
            in_a_row = in_a_row + 1 if at_once else 0
            if not at_once:
                generation = self._await_training(generation)
                if number % self.look_every == 0:
                    self._look(number, since_witness)
            time.sleep(chance.uniform(0, _HEALS_WITHIN_S if at_once else _TRAINS_FOR_S))
            victims = chance.choice([(0,), (1,), (0, 1)])
            if not at_once and since_witness >= WITNESS_DIES_EVERY:
                victims, since_witness = (WITNESS,), 0
            with self._processes(victims) as pidfds:
                for pidfd in pidfds:
                    with contextlib.suppress(ProcessLookupError):
                        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                        self.kills += 1
            self.pairs += len(victims) == 2
            since_witness += 1
        self._await_training(generation)
        self._look(kills, since_witness)

    @contextlib.contextmanager
    def _processes(self, ranks: tuple[int, ...]) -> Iterator[list[int]]:
        """Of those of these ranks that live, or that are still to be seen as dead."""
        with contextlib.ExitStack() as opened:
            pidfds = []
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    pidfds.append(os.pidfd_open(self.board.rows()[rank].pid))
                    opened.callback(os.close, pidfds[-1])
            yield pidfds

    def _await_training(self, older: int) -> int:
        """Until all ranks have finished a step in a newer generation; which one it is."""
        began = time.monotonic()

        def trains() -> bool:
            rows = self.board.rows()
            return rows[0].generation > older and all(
                row.generation == rows[0].generation and row.steps > 0 for row in rows
            )

        deadline = began + 60.0
        while not trains():
            assert time.monotonic() < deadline, f"{self.board.rows()}: {self.job.stderr()[-4000:]}"
            assert self.job.agent.poll() is None, self.job.stderr()[-4000:]
            time.sleep(_LOOK_EVERY_S)
        self.healed_s.append(time.monotonic() - began)
        return self.board.rows()[0].generation

    # --- what is held ------------------------------------------------------------------------------

    def _look(self, kills: int, witness_heals: int) -> None:
        """A process that is just leaving, and a file that is just being read or written, are gone at the next look."""
        deadline = time.monotonic() + _SETTLES_WITHIN_S
        sight = self._sight(kills, witness_heals)
        while not self._is_settled(sight) and time.monotonic() < deadline:
            time.sleep(_LOOK_AGAIN_S)
            sight = self._sight(kills, witness_heals)
        self.sights.append(sight)

    def _is_settled(self, sight: Sight) -> bool:
        if sight.processes > PROCESSES:
            return False
        return len(self.sights) < 2 or sight.is_no_more_than(self.sights[1])

    def _sight(self, kills: int, witness_heals: int) -> Sight:
        job = self.job
        processes = len(job.processes())
        files = [path for place in self._places() for path in place.rglob("*")]
        witness = self.board.rows()[WITNESS].pid
        held = [held_by(pid) for pid in (job.agent.pid, job.zygote(), witness)]
        return Sight(kills, processes, *held, witness_heals, len(files))

    def _places(self) -> list[Path]:
        """Where the commits are, and the temporary folder of the job."""
        environ = Path(f"/proc/{self.board.rows()[WITNESS].pid}/environ").read_bytes().split(b"\0")
        scratch = [
            Path(each.decode().partition("=")[2]) for each in environ if each.startswith(b"DDP_SCRATCH=")
        ]
        return [
            *scratch,
            *(each for each in self.job.temp.iterdir() if not each.name.startswith("ddp-launch-")),
        ]

    # --- what came of it ---------------------------------------------------------------------------

    def ends(self) -> list[dict[str, Any]]:
        return [json.loads((self.job.there / f"end-{rank}").read_text()) for rank in range(RANKS)]

    def restarts(self) -> int:
        """Of all ranks: there was no survivor."""
        return self.job.stderr().count("; restarting ")

    def violations(self) -> str:
        path = self.job.there / "violations"
        return path.read_text() if path.exists() else ""


def held_by(pid: int) -> Held:
    """Also what a rank shares with the zygote: such a page becomes its own when it writes there."""
    status = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    (anonymous,) = (int(line.split()[1]) for line in status if line.startswith("Anonymous:"))
    return Held(len(os.listdir(f"/proc/{pid}/fd")), 1024 * anonymous)
