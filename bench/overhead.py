"""What it costs a step that somebody watches: status page, tracing, hang watch, stragglers, health and guard.

    python bench/overhead.py [--models 'MLP, 1M' ...] [--kinds 'torch DDP' ...] [--ranks 2 1]
                             [--launches 6] [--rounds 8] [--json FILE] [--write-docs]

Two jobs are there at the same time, one with everything on (the defaults), one with everything off, and train in turns
of a moment, in an order that alternates. Who has no turn waits in a read from a pipe, and its launcher is stopped
meanwhile: what the launcher does on the side falls into the turns of its own job. Where torchrun can run the same, it
has a turn too. A ratio is a step's time over that of the job with everything off, in the same round. With two ranks a
step is mostly waiting for the other's gradients, and how long that takes depends on the moment; one rank alone does and
writes all the same, and shows best what that costs.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from shown import machine, option_parser, write_between_markers
from sidebyside import DDP_LAUNCH, TORCHRUN
from watched import RANK_SCRIPTS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from typing import IO

SCRIPT = os.path.join(RANK_SCRIPTS, "trains_in_turns.py")
MODELS = {"MLP, 1M": "overhead-mlp", "GPT-like, 30M": "overhead-gpt"}  # and the place of its table
KINDS = ["torch DDP", "our DDP, Gloo", "our DDP, shm"]
ON, OFF, APART = "everything on", "everything off", "torchrun"
ALL_OFF = ("--trace-collectives", "off", "--hang-timeout", "off", "--stragglers", "off", "--preflight", "off")
TARGET = 1.01
WARM_UP_STEPS = 20
TURN_S = 0.3


@dataclass(frozen=True)
class Setting:
    model: str
    kind: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.model}, {self.kind}, {self.ranks} rank{'s' if self.ranks > 1 else ''}"


class Job:
    """A launcher whose ranks train when they are told how many steps."""

    def __init__(self, folder: str, name: str, asked: Setting) -> None:
        self.name = name
        self._folder = os.path.join(folder, name.replace(" ", "-"))
        os.mkdir(self._folder)
        pipes = [self._path(f"turn-{rank}") for rank in range(asked.ranks)]
        for path in (*pipes, self._path("took")):
            os.mkfifo(path)
        command = self._command(asked)
        with open(self._path("output"), "wb") as output:
            self._launcher = subprocess.Popen(command, stdout=output, stderr=output)
        # Opened for both ways: opening waits for nobody, and a rank that is gone is no end of file.
        self._turns: list[IO[str]] = [open(os.open(path, os.O_RDWR), "w", buffering=1) for path in pipes]
        self._took: IO[str] = open(os.open(self._path("took"), os.O_RDWR))

    def _command(self, asked: Setting) -> list[str]:
        contender = TORCHRUN if self.name == APART else DDP_LAUNCH
        watched = "off" if self.name == OFF else "on"
        return contender.argv(*self._words(asked), SCRIPT, self._folder, asked.model, asked.kind, watched)

    def _words(self, asked: Setting) -> tuple[str, ...]:
        return ("--nproc-per-node", str(asked.ranks), *(ALL_OFF if self.name == OFF else ()))

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def train(self, steps: int) -> float:
        """Seconds for one step."""
        self._launcher.send_signal(signal.SIGCONT)
        for turn in self._turns:
            turn.write(f"{steps}\n")
        while not select.select([self._took], (), (), 1.0)[0]:
            if self._launcher.poll() is not None:
                with open(self._path("output")) as output:
                    sys.exit(f"a job does not train any more: {output.read()[-2000:]}")
        took = float(self._took.readline())
        self._launcher.send_signal(signal.SIGSTOP)
        return took / steps

    def end(self) -> None:
        self._launcher.send_signal(signal.SIGCONT)
        for turn in self._turns:
            turn.write("0\n")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(20)
        self._launcher.kill()
        self._launcher.wait()
        for file in (*self._turns, self._took):
            file.close()


@dataclass(frozen=True)
class Found:
    setting: Setting
    taken: dict[str, list[float]]

    def ratios(self, name: str) -> list[float]:
        pairs = zip(self.taken[name], self.taken[OFF], strict=True)
        return [one / other for one, other in pairs]


def measured(setting: Setting, launches: int, rounds: int, job: type[Job] = Job) -> Found:
    """Jobs differ by where their memory and threads happen to lie: they are launched anew, in another order."""
    names = [OFF, ON, *([APART] if setting.kind == KINDS[0] else [])]
    taken: dict[str, list[float]] = {name: [] for name in names}
    for launch in range(launches):
        first = launch % len(names)
        _launch(setting, names[first:] + names[:first], rounds, taken, job)
    return Found(setting, taken)


def _launch(
    setting: Setting, names: list[str], rounds: int, taken: dict[str, list[float]], kind: type[Job]
) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, contextlib.ExitStack() as running:
        jobs = []
        for name in names:
            jobs.append(kind(folder, name, setting))
            running.callback(jobs[-1].end)
        steps = max(3, round(TURN_S / min([job.train(WARM_UP_STEPS) for job in jobs])))
        for number in range(rounds):
            turn = number % len(jobs)
            for job in jobs[turn:] + jobs[:turn]:
                taken[job.name].append(job.train(steps))


# --- what is shown -----------------------------------------------------------------------------------


def table(found: Sequence[Found]) -> str:
    lines = [
        "| | everything off | everything on | on / off: median (middle half of rounds) | target | |"
        " torchrun / off |",
        "|---|---:|---:|---:|---:|---|---:|",
    ]
    for one in found:
        off, on = (f"{statistics.median(one.taken[name]) * 1e3:.3f} ms" for name in (OFF, ON))
        ratios = one.ratios(ON)
        verdict = "met" if statistics.median(ratios) <= TARGET else "not met"
        apart = _spread(one.ratios(APART)) if APART in one.taken else ""
        cells = (str(one.setting), off, on, _spread(ratios), f"<= {TARGET:g}", verdict, apart)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(ratios: list[float]) -> str:
    if len(ratios) < 2:
        return f"{ratios[0]:.4f}"
    low, _, high = statistics.quantiles(ratios, n=4)
    return f"{statistics.median(ratios):.4f} ({low:.4f} .. {high:.4f})"


def arguments() -> argparse.Namespace:
    parser = option_parser(__doc__ or "", rounds=8)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 1])
    parser.add_argument(
        "--launches", type=int, default=6, help="of all jobs, so many rounds each (default 6)"
    )
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    signal.signal(signal.SIGALRM, lambda *_: sys.exit("a job does not train any more"))
    machine_line, found = machine(), []
    for model in options.models:
        of_model = []
        for kind, ranks in itertools.product(options.kinds, options.ranks):
            signal.alarm(options.launches * (int(options.timeout) + options.rounds * 5))
            of_model.append(measured(Setting(model, kind, ranks), options.launches, options.rounds))
        counts = f"{options.launches} launches of {options.rounds} rounds each."
        text = f"{table(of_model)}\n\n{counts}\n\nMachine: {machine_line}."
        print(text, flush=True)
        if options.write_docs:
            write_between_markers(options.write_docs, MODELS[model], text)
        found += of_model
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": machine_line, "found": [asdict(one) for one in found]}, file, indent=1)


if __name__ == "__main__":
    main()
