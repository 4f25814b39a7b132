"""How long it takes to start a job and to be rid of it: torchrun and ddp-launch in turns.

    python bench/launch.py [--rounds 7] [--ranks 2 8] [--json FILE] [--write-docs]

The script of the ranks imports torch, forms a Gloo group, does one all-reduce and exits. Counted from just before
the command is executed: until the last rank has torch imported, until that all-reduce is done, until the command
has exited; and the processor seconds of the command with all its processes.

The last table starts ddp-launch from the warm pool: its template is made before the first round, and each run has
another value of a variable that nothing reads, as a run ID is. Processor time is left out there, because these ranks
are not below the command.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

from shown import machine, option_parser, report
from sidebyside import DDP_LAUNCH, TORCHRUN, Contender, Finding, Quantity, play
from watched import RANK_SCRIPTS, WatchedRun, names_of_pipes

if TYPE_CHECKING:
    import argparse

SCRIPT = os.path.join(RANK_SCRIPTS, "one_reduction.py")
TARGETS = {2: (0.5, 0.43), 8: (0.2, 0.25)}  # all have torch, command exits; set for 2 CPUs

POOLED_TARGETS = (0.1, 0.15)


class Pool:
    """A warm pool of its own. Make it before the first `WatchedRun`, which adopts and ends what commands leave."""

    def __init__(self, ranks: int) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="bench-pool-")
        self.runs = os.path.join(self._place.name, "run")
        folder = os.path.join(self._place.name, "pool")
        self.contender = Contender("pooled", "ddp-launch", (("DDP_LAUNCH_WARM_DIR", folder),))
        self.call("start", *self.contender.argv("--nproc-per-node", str(ranks), SCRIPT)[1:])

    def call(self, *words: str) -> str:
        command = [self.contender.argv()[0], "warm", *words]
        env = {**os.environ, **dict(self.contender.env), **names_of_pipes(self.runs)}
        return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout

    def end(self) -> None:
        """Raise if a run did not start from the template: its figures belong to no table."""
        told = self.call("status")
        self.call("stop")
        self._place.cleanup()
        if "started cold" in told:
            raise SystemExit(told)


def measure(contender: Contender, ranks: int, timeout_s: float, folder: str = "") -> dict[str, float]:
    command = contender.argv("--nproc-per-node", str(ranks), SCRIPT)
    with WatchedRun(command, dict(contender.env), timeout_s, folder) as run:
        cpu = run.finish()
        return {
            "torch": run.last("torch", ranks) - run.started,
            "reduced": run.last("reduced", ranks) - run.started,
            "exit": run.ended[run.pid] - run.started,
            "cpu": cpu,
        }


def quantities(ranks: int) -> tuple[Quantity, ...]:
    imported, exited = TARGETS.get(ranks, (None, None))
    return (
        Quantity("torch", "all ranks have torch imported", ratio=imported),
        Quantity("reduced", "first all-reduce done"),
        Quantity("exit", "command has exited", ratio=exited),
        Quantity("cpu", "processor time, all processes"),
    )


def pooled_quantities() -> tuple[Quantity, ...]:
    imported, exited = POOLED_TARGETS
    return (
        Quantity("torch", "all ranks have torch imported", ratio=imported),
        Quantity("reduced", "first all-reduce done"),
        Quantity("exit", "command has exited", ratio=exited),
    )


def measure_pooled(pool: Pool, ranks: int, options: argparse.Namespace) -> Finding:
    def one(contender: Contender) -> dict[str, float]:
        folder = pool.runs if contender is pool.contender else ""
        contender = replace(contender, env=(*contender.env, ("RUN_OF_THE_USER", uuid.uuid4().hex)))
        return measure(contender, ranks, options.timeout, folder)

    rounds = play(one, TORCHRUN, pool.contender, options.rounds, options.warm_up)
    pool.end()
    return Finding(f"{ranks} rank{'s' if ranks != 1 else ''}, warm pool", pooled_quantities(), rounds)


def main() -> None:
    parser = option_parser(__doc__ or "")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8], help="default: 2 8")
    options = parser.parse_args()
    machine_line = machine()
    pool = Pool(options.ranks[0])
    findings = []
    for ranks in options.ranks:

        def one(contender: Contender, ranks: int = ranks) -> dict[str, float]:
            return measure(contender, ranks, options.timeout)

        rounds = play(one, TORCHRUN, DDP_LAUNCH, options.rounds, options.warm_up)
        title = f"{ranks} rank{'s' if ranks != 1 else ''}"
        findings.append(Finding(title, quantities(ranks), rounds))
    findings.append(measure_pooled(pool, options.ranks[0], options))
    report("launch", findings, machine_line, options)


if __name__ == "__main__":
    main()
