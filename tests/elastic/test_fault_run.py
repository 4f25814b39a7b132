"""A job with many faults ends with the bits of a job without: parameters, optimizer, losses, generators of ranks."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import generations
import pytest
from launched import Launched, eventually
from ports import free_port

HERE = Path(__file__).parent
PROGRAM = HERE / "programs" / "under_faults.py"
FAULTS = HERE.parents[1] / "bench" / "faults" / "programs"
# Each is done to one rank; the launcher ends all others.
KINDS = [
    "kills_itself",
    "raises",
    "segfaults",
    "exits_3",
    "allocates_beyond_its_limit",
    "aborts",
    "leaves_7",
    "divides_by_zero",
    "recurses",
    "reads_a_shrunken_file",
]
HANGS = ["loops", "stops_itself"]  # these take the time of --hang-timeout
PLACES = [
    "forward",
    "backward",
    "before the optimizer",
    "before the commit",
    "in the commit",
    "after the commit",
]
WITHIN_S = 900.0
NIGHTLY = pytest.mark.nightly(
    instead=(
        "elastic/test_going_on.py::test_ranks_die_and_the_loss_curve_is_that_of_an_undisturbed_run",
        "elastic/test_going_on.py::test_a_replaced_node_is_given_the_state",
        "elastic/test_launched.py::test_the_examples_go_on_where_they_were",
        "elastic/test_in_place.py",
    )
)
Fault = tuple[int, str, int, str]


def planned(count: int, kinds: list[str], seed: int) -> list[Fault]:
    """Every second step one of these, in turn, at a place and a rank by chance."""
    chance = random.Random(seed)
    turns = itertools.islice(itertools.cycle(kinds), count)
    return [(2 * k + 2, chance.choice(PLACES), chance.randrange(2), kind) for k, kind in enumerate(turns)]


class Run:
    """Two ranks on one node."""

    def __init__(
        self,
        folder: Path,
        backend: str,
        faults: list[Fault],
        recover: str = "restart",
    ) -> None:
        self.folder, self.faults, self.recover = folder, faults, recover
        self.notes = folder / "notes"
        self.notes.mkdir(parents=True)
        self.steps = 2 * len(faults) + 4
        plan = {"faults": faults, "steps": self.steps, "backend": backend, "recover": recover}
        plan |= {"programs": str(FAULTS), "hosts": 2 if backend == "hier" else 1}
        self.env = {"PLAN": json.dumps(plan), "NOTES": str(self.notes), "GLOO_SOCKET_IFNAME": "lo"}
        self._jobs: list[Launched] = []
        self._numbers = itertools.count()
        self._place = f"127.0.0.1:{free_port()}"

    def _start(self) -> Launched:
        words = ["--max-restarts", "200", "--recover", self.recover, "--shutdown-timeout", "2"]
        words += ["--hang-timeout", "3", "--preload", "torch._dynamo", "--nproc-per-node", "2"]
        folder = self.folder / f"node{next(self._numbers)}"
        env = self.env | {"DDP_RENDEZVOUS_INSECURE": "1"}
        self._jobs.append(Launched(folder, *words, str(PROGRAM), env=env))
        return self._jobs[-1]

    def play(self) -> list[dict[str, Any]]:
        try:
            nodes = [self._start()]
            self._until(lambda: all(node.agent.poll() is not None for node in nodes), nodes)
            assert [node.agent.returncode for node in nodes] == [0] * len(nodes), self._words(nodes)
        finally:
            for job in self._jobs:
                job.clean_up()
        done = {path.name for path in self.notes.glob("fault-*")}
        assert done == {f"fault-{number}" for number in range(len(self.faults))}, "not every fault was done"
        return self.end()

    def _until(self, condition: Any, nodes: list[Launched]) -> None:
        def met() -> bool:
            return condition() or any(node.agent.poll() not in (None, 0) for node in nodes)

        eventually(met, WITHIN_S, "the job goes on")
        assert condition(), self._words(nodes)

    def _words(self, nodes: list[Launched]) -> str:
        return "\n".join(node.stderr()[-4000:] for node in nodes)

    def end(self) -> list[dict[str, Any]]:
        return [json.loads((self.notes / f"end-{rank}").read_text()) for rank in range(2)]


def calm(folder: Path, backend: str, count: int) -> list[dict[str, Any]]:
    """The same steps without faults, and without the launcher."""
    run = Run(folder, backend, [])
    plan = json.loads(run.env["PLAN"]) | {"steps": 2 * count + 4}
    codes = generations.play(PROGRAM, folder, 2, 0, run.env | {"PLAN": json.dumps(plan)})
    assert not any(codes), "\n".join(path.read_text() for path in sorted(folder.glob("rank*")))
    return run.end()


@NIGHTLY
@pytest.mark.timeout(WITHIN_S)
@pytest.mark.parametrize(
    ("backend", "recover", "count"),
    [
        ("shm", "restart", 50),
        ("hier", "restart", 50),
        ("gloo", "restart", 50),
        ("shm", "in-place", 50),
        ("gloo", "in-place", 12),
    ],
)
def test_many_faults_leave_the_bits_as_they_are(
    tmp_path: Path, backend: str, recover: str, count: int
) -> None:
    faults = planned(count, KINDS + HANGS, seed=count)
    end = Run(tmp_path / "faults", backend, faults, recover).play()
    assert end == calm(tmp_path / "calm", backend, count)
