"""Death of a rank to the first training step of the next generation, for several jobs and launchers, in turns.

Used by restart.py (one node) and recovery.py (two nodes). Each job is a model, a DDP, and whether it is compiled. The
last rank kills itself between two steps, in a job that has trained for some seconds. Time ends when all ranks of the
next generation have finished a step.

NVRx's ft_launcher and torchft take part if their commands are in the folder `--others`, by default beside this
interpreter. torchft is no launcher: each rank is a replica group with a torchrun of its own, the DDP is torchft's own,
and the rank that did not die keeps its process. Its time ends when the new rank has finished a step to which both ranks
contributed. Until then the other rank may train alone, which the figure does not show.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from shown import machine, publish
from sidebyside import DDP_LAUNCH, Contender, Run, play_all
from watched import RANK_SCRIPTS, RunFailed, WatchedRun

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

TORCHRUN = Contender("torchrun", "torchrun", (("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),))
TRAINS = os.path.join(RANK_SCRIPTS, "trains_once.py")
TORCHFT_TRAINS = os.path.join(RANK_SCRIPTS, "trains_torchft.py")
REPLICAS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "meet", "replicas.py")
NVRX, TORCHFT = "NVRx", "torchft"
MODELS = {"mlp": "MLP", "gpt": "GPT-like model"}
DDPS = {"torch": "torch's DDP", "ours": "our DDP"}
JOBS = {
    " ".join((model, ddp, *compiled)): ", ".join((MODELS[model], DDPS[ddp], *("compiled" for _ in compiled)))
    for compiled in ((), ("compile",))
    for model in MODELS
    for ddp in DDPS
}
TARGET_RATIO = 0.15  # for torch's DDP on one node, not compiled
_OF_TARGET = ("mlp torch", "gpt torch")

if TYPE_CHECKING:
    Played = dict[str, list[dict[str, Run]]]


@dataclass(frozen=True, slots=True)
class OfSteps:
    """The part "steps" of one bench.

    `name`: of its place in the document. `command`: what starts a script with these words under this launcher.
    """

    name: str
    ranks: int
    command: Callable[[Contender, list[str]], list[str]]
    with_torchft: bool
    has_target: bool


def play_parts(
    parser: argparse.ArgumentParser, of_death: Callable[[argparse.Namespace], None], of_steps: OfSteps
) -> None:
    """Add the options of the parts, read the command line, and measure the parts that it names."""
    _add_options(parser)
    options = parser.parse_args()
    if "death" in options.parts:
        of_death(options)
    if "steps" in options.parts:
        machine_line = machine()
        players = _contenders(options, torchft=of_steps.with_torchft)
        played = _play_jobs(options, players, of_steps)
        _report(of_steps, played, players, machine_line, options)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--train-for", type=float, default=8.0, help="seconds from the first step to the death (default 8)"
    )
    parser.add_argument(
        "--parts", nargs="+", choices=("death", "steps"), default=["death", "steps"], help="default: both"
    )
    parser.add_argument(
        "--jobs",
        nargs="+",
        choices=tuple(JOBS),
        default=list(JOBS),
        help="of the part steps (default: all of them)",
    )
    parser.add_argument(
        "--others",
        metavar="BIN",
        default=os.path.dirname(sys.executable),
        help="folder with ft_launcher and torchft_lighthouse (default: beside this interpreter)",
    )


def _contenders(options: argparse.Namespace, *, torchft: bool) -> list[Contender]:
    """With those of the other projects that are installed."""
    found = [TORCHRUN, DDP_LAUNCH]
    nvrx = os.path.join(options.others, "ft_launcher")
    if os.path.exists(nvrx):
        found.append(Contender(NVRX, nvrx, TORCHRUN.env))
    if torchft and os.path.exists(os.path.join(options.others, "torchft_lighthouse")):
        found.append(Contender(TORCHFT, os.path.join(options.others, "python"), TORCHRUN.env))
    return found


def _to_first_step(
    command: list[str], contender: Contender, ranks: int, options: argparse.Namespace
) -> float:
    bound_s = options.timeout + options.train_for
    new_ranks = 1 if contender.name == TORCHFT else ranks
    with WatchedRun(command, dict(contender.env), bound_s) as run:
        run.until(lambda run: len(run.of("stepped")) == ranks)
        time.sleep(options.train_for)  # what is measured depends on it, so it is a part of the measurement
        run.open_gate(1)
        run.until(lambda run: len(run.of("stepped", attempt=1)) == new_ranks)
        return run.last("stepped", new_ranks, attempt=1) - run.last("kill", 1)


def _play_jobs(options: argparse.Namespace, players: Sequence[Contender], of_steps: OfSteps) -> Played:
    ranks = of_steps.ranks

    def measure(contender: Contender, job: str) -> dict[str, float]:
        words = job.split()
        if contender.name != TORCHFT:
            command = of_steps.command(contender, [TRAINS, *words])
            return {"stepped": _to_first_step(command, contender, ranks, options)}
        if "ours" in words:
            raise RunFailed("torchft has a DDP of its own")
        command = [contender.command, REPLICAS, str(ranks), TORCHFT_TRAINS, *words]
        return {"stepped": _to_first_step(command, contender, ranks, options)}

    played: Played = {}
    for job in options.jobs:
        print(JOBS[job], file=sys.stderr, flush=True)
        fitting = [each for each in players if each.name != TORCHFT or "ours" not in job.split()]
        played[job] = [
            play_all(lambda contender, job=job: measure(contender, job), fitting, number)  # type: ignore[misc]
            for number in range(-options.warm_up, options.rounds)
        ][options.warm_up :]
    return played


def _table(played: Played, players: Sequence[Contender], *, has_target: bool) -> str:
    names = [each.name for each in players]
    titles = [
        "first training step after the death",
        *names,
        "ddp-launch / torchrun (min .. max)",
        "target",
        "",
    ]
    lines = [_line(titles), _line(["---", *("---:" for _ in titles[2:]), "---"])]
    for job, rounds in played.items():
        ratios = [each["ddp-launch"] / each["torchrun"] for each in map(_figures, rounds) if _both(each)]
        cells = [JOBS[job], *(_median(rounds, name) for name in names), _spread(ratios)]
        if has_target and job in _OF_TARGET:
            met = ratios and statistics.median(ratios) <= TARGET_RATIO
            cells += [f"<= {TARGET_RATIO:g}", "met" if met else "not met" if ratios else "no figure"]
        else:
            cells += ["", ""]
        lines.append(_line(cells))
    return "\n".join(lines)


def _tally(played: Played, players: Sequence[Contender]) -> str:
    parts = []
    for name in (each.name for each in players):
        runs = [each[name] for rounds in played.values() for each in rounds if name in each]
        parts.append(f"{name} {len(runs)} runs, {sum(1 for run in runs if run.problem)} without a figure")
    return "; ".join(parts) + "."


def _report(
    of_steps: OfSteps,
    played: Played,
    players: Sequence[Contender],
    machine_line: str,
    options: argparse.Namespace,
) -> None:
    load = f"load average at the end {os.getloadavg()[0]:.2f}"
    text = "\n\n".join(
        (
            _table(played, players, has_target=of_steps.has_target),
            _tally(played, players),
            f"Machine: {machine_line}, {load}.",
        )
    )
    whole = _tables_of_death(options)
    whole["steps"] = {
        job: [{name: asdict(run) for name, run in each.items()} for each in rounds]
        for job, rounds in played.items()
    }
    publish(of_steps.name, text, whole, options)


def _tables_of_death(options: argparse.Namespace) -> dict[str, Any]:
    """What the other part of this command has saved."""
    if not options.json or "death" not in options.parts:
        return {}
    with open(options.json) as file:
        return dict(json.load(file))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _figures(each: dict[str, Run]) -> dict[str, float]:
    return {name: run.figures["stepped"] for name, run in each.items() if run.figures}


def _both(figures: dict[str, float]) -> bool:
    return {"torchrun", "ddp-launch"} <= figures.keys()


def _median(rounds: list[dict[str, Run]], name: str) -> str:
    values = [figures[name] for figures in map(_figures, rounds) if name in figures]
    return f"{statistics.median(values):.3f} s" if values else "-"


def _spread(ratios: list[float]) -> str:
    if not ratios:
        return "-"
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} .. {max(ratios):.3f})"
