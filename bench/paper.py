"""The experiments of the DDP paper (arXiv 2006.15704) on the processors of this machine.

    python bench/paper.py [--figures chunks ready ...] [--rounds 5] [--json FILE] [--write-docs [FILE]]

Each figure is measured by `bench/paper_rank.py`, with two ranks: on this machine, or on two hosts (network namespaces)
with a limited link, which need root, `ip` and `tc`. `--write-docs` puts a table between its markers in
docs/paper.md, where they are, and draws docs/img/paper-FIGURE.png.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "ddp_models"))

from hosts import UNLIMITED, play, switched, why_not
from models import Writer, resnet
from shown import ROOT, machine, write_between_markers

from ddp_launch_wings.plan import step_model
from ddp_launch_wings.plan.step_model import NVLINK, TRANSPORTS, Cluster, Gradient, Link, Profile

if TYPE_CHECKING:
    from collections.abc import Sequence

_RANK = os.path.join(ROOT, "bench", "paper_rank.py")
_TIMEOUT_S = 280.0
_CHUNKS = [10_000, 100_000, 1_000_000, 10_000_000, 60_000_000]
_CAPS = [1e-6, 1, 5, 10, 25, 50, 1000]
_CADENCES = [1, 2, 4, 8]
_HOOKS = ["all_reduce", "fp16"]

Series = dict[str, list[tuple[float, float]]]


@dataclass(frozen=True)
class Run:
    """One set of ranks: `rate` None is this machine, otherwise two hosts with that link."""

    title: str
    trial: dict[str, Any]
    rate: str | None = None
    hosts: int = 2
    mpi: bool = False


@dataclass(frozen=True)
class Figure:
    x: str
    y: str
    runs: tuple[Run, ...]
    labels: dict[float, str] = field(default_factory=dict)  # of values of x that are not numbers
    log_x: bool = False


def _both(title: str, trial: dict[str, Any], rate: str = "1gbit") -> tuple[Run, Run]:
    near = Run(f"{title}, one machine", {**trial, "fast": "shm"})
    return near, Run(f"{title}, link of {rate}", {**trial, "fast": "hier"}, rate)


FIGURES = {
    "chunks": Figure(
        "float32 values per all-reduce",
        "s",
        (
            Run("60M values, one machine", {"backends": ["gloo", "shm", "hier"], "sizes": _CHUNKS}),
            Run("60M values, MPI", {"backends": ["mpi4py"], "sizes": _CHUNKS}, mpi=True),
        ),
        log_x=True,
    ),
    "ready": Figure(
        "parameters with a ready gradient",
        "s",
        (Run("backward", {"models": ["ResNet-152", "BERT-base-sized"]}, hosts=1),),
    ),
    "overlap": Figure(
        "averages",
        "s per step",
        (
            *_both("idle backward", {"model": "idle backward"}),
            *_both("ResNet-50-like", {"model": "ResNet-50-like"}),
        ),
        {0: "during the backward", 1: "after it", 2: "never"},
    ),
    "buckets": Figure(
        "bucket size in MiB",
        "s per step",
        (
            *_both("2,000 x 1,000", {"model": "2,000 x 1,000", "caps": _CAPS}),
            *_both("idle backward", {"model": "idle backward", "caps": _CAPS}),
        ),
        {1e-6: "each parameter alone", 1000: "all in one"},
    ),
    "skip": Figure(
        "micro-batches per average",
        "s per micro-batch",
        _both("ResNet-50-like", {"model": "ResNet-50-like", "cadences": _CADENCES}),
    ),
    "loss": Figure(
        "samples",
        "loss on held-out samples",
        (Run("a small network", {"cadences": _CADENCES, "batches": 800, "fast": "shm"}),),
    ),
    "scale": Figure("ranks", "s per step", ()),
    "robin": Figure(
        "process groups",
        "s per step",
        (
            Run("idle backward, one machine", {"model": "idle backward", "groups": [1, 3, 5], "cap": 8}),
            Run(
                "idle backward, link of 1gbit",
                {"model": "idle backward", "groups": [1, 3, 5], "cap": 8},
                "1gbit",
            ),
        ),
    ),
    "order": Figure(
        "order of buckets",
        "s per step",
        _both("", {"models": ["runs out of order", "idle backward", "ResNet-50-like"], "cap": 8}, "4gbit"),
        {0: "reverse", 1: "arrival"},
    ),
    "hooks": Figure(
        "hook",
        "s per step; loss",
        (
            Run(
                "MLP, link of 1gbit",
                {"model": "MLP, 1M", "hooks": _HOOKS, "batches": 400, "fast": "gloo"},
                "1gbit",
            ),
        ),
        {0: "s per step", 1: "loss"},
    ),
}


# --- figure 9, predicted ---------------------------------------------------------------------------------

_WORLDS = [1, 2, 4, 8, 16, 32, 64, 128, 256]
_OF_A_SERVER = 8
_VARIATION = 0.02
# Assumed: the seconds that one GPU computes in a step, two thirds of them in the backward.
_COMPUTING = {"ResNet-50": 0.12, "BERT": 0.25}
# Gloo copies to the host, and one connection does not fill the link.
_LINKS = {"nccl": Link(1.25e10, 5e-6), "gloo": Link(1.25e9, 3e-5)}


def predicted() -> Series:
    """Seconds of a step by ranks, from the model of `ddp-launch plan`."""
    models = {"ResNet-50": resnet(), "BERT": Writer(30_522, 768)}
    found: Series = {}
    for backend, link in _LINKS.items():
        for name, model in models.items():
            profile = _assumed_profile([each.numel() * 4 for each in model.parameters()], _COMPUTING[name])
            found[f"{backend}, {name}"] = [
                (ranks, step_model.ddp(profile, _servers(ranks, link), TRANSPORTS[backend]).seconds)
                for ranks in _WORLDS
            ]
    return found


def _assumed_profile(sizes: list[int], computing: float) -> Profile:
    backward, count = computing * 2 / 3, len(sizes)
    gradients = (
        Gradient(nbytes, backward * (number + 1) / count) for number, nbytes in enumerate(reversed(sizes))
    )
    samples = tuple(computing * (1 + _VARIATION * z) for z in (-0.6745, 0.0, 0.6745))  # quartiles
    return Profile(tuple(gradients), backward, computing - backward, samples, 1, "cuda")


def _servers(ranks: int, link: Link) -> Cluster:
    each = min(ranks, _OF_A_SERVER)
    return Cluster(ranks // each, each, link, NVLINK)


# --- runs ----------------------------------------------------------------------------------------------


def measured(name: str, run: Run, rounds: int) -> Series:
    trial = {**run.trial, "figure": name, "rounds": rounds}
    if run.mpi:
        found = _with_mpi(trial)
    elif run.rate is None:
        with switched(1, UNLIMITED) as names:
            found = play(names, run.hosts, [_RANK], trial, _TIMEOUT_S)
    else:
        with switched(run.hosts, run.rate) as names:
            found = play(names, 1, [_RANK], trial, _TIMEOUT_S)
    print(f"measured: {name}, {run.title}", file=sys.stderr, flush=True)
    return {series: [(x, y) for x, y in points] for series, points in found.items()}


def _with_mpi(trial: dict[str, Any]) -> Any:
    mpiexec = shutil.which("mpiexec", path=f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', '')}")
    if mpiexec is None:
        print("skipped: there is no mpiexec here", file=sys.stderr)
        return {}
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "trial.json"), "w") as file:
            json.dump({**trial, "mpi": True}, file)
        subprocess.run([mpiexec, "-n", "2", sys.executable, _RANK, folder], check=True, timeout=_TIMEOUT_S)
        with open(os.path.join(folder, "taken.json")) as file:
            return json.load(file)


# --- what is shown ---------------------------------------------------------------------------------------


def text_of(figure: Figure, found: Sequence[tuple[str, Series]]) -> str:
    blocks = []
    for title, series in found:
        xs = sorted({x for points in series.values() for x, _ in points})
        if len(xs) > 12:  # a curve: the picture shows it
            blocks.append(_ends_of(title, series))
            continue
        head = [f"| {title} ({figure.y}) | {' | '.join(_label(figure, x) for x in xs)} |"]
        head.append(f"|---|{'---:|' * len(xs)}")
        blocks.append("\n".join([*head, *(_row(name, dict(points), xs) for name, points in series.items())]))
    return "\n\n".join(blocks)


def _row(name: str, points: dict[float, float], xs: Sequence[float]) -> str:
    cells = (f"{points[x]:.4g}" if x in points else "-" for x in xs)
    return f"| {name} | {' | '.join(cells)} |"


def _ends_of(title: str, series: Series) -> str:
    rows = [f"| {title} | a quarter of the last x | half | all |", "|---|---:|---:|---:|"]
    for name, points in series.items():
        last = points[-1][0]
        reached = (next(y for x, y in points if x >= share * last) for share in (0.25, 0.5, 1.0))
        rows.append(f"| {name} | {' | '.join(f'{y:.3g}' for y in reached)} |")
    return "\n".join(rows)


def _label(figure: Figure, x: float) -> str:
    return figure.labels.get(x, f"{x:,.10g}")


def draw(path: str, figure: Figure, found: Sequence[tuple[str, Series]], machine_line: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [(title, series) for title, series in found if series]
    picture, axes = pyplot.subplots(
        1, len(shown), figsize=(5 * len(shown), 3.6), squeeze=False, layout="constrained"
    )
    for axis, (title, series) in zip(axes.flat, shown, strict=True):
        xs = sorted({x for points in series.values() for x, _ in points})
        named = len(xs) <= 12 and not figure.log_x
        for name, points in series.items():
            places = [xs.index(x) if named else x for x, _ in points]
            axis.plot(places, [y for _, y in points], marker="o" if named else "", label=name)
        if named:
            axis.set_xticks(range(len(xs)), [_label(figure, x) for x in xs], fontsize=7)
        if figure.log_x:
            axis.set_xscale("log")
        axis.set(title=title, xlabel=figure.x, ylabel=figure.y, ylim=(0, None))
        axis.legend(fontsize=7)
    picture.supxlabel(machine_line, fontsize=6, color="#606060")
    picture.savefig(path, dpi=100)
    pyplot.close(picture)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--figures", nargs="+", default=list(FIGURES), choices=list(FIGURES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="write every point there")
    page = os.path.join(ROOT, "docs", "paper.md")
    parser.add_argument("--write-docs", metavar="FILE", nargs="?", const=page)
    pictures = os.path.join(ROOT, "docs", "img")
    parser.add_argument("--pictures", metavar="FOLDER", default=pictures, help="default: docs/img")
    options = parser.parse_args()
    if problem := why_not():
        print(f"skipped: {problem}")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    everything = {}
    for name in options.figures:
        figure, machine_line = FIGURES[name], machine()
        found = [(run.title.lstrip(", "), measured(name, run, options.rounds)) for run in figure.runs]
        if name == "scale":
            found = [("predicted", predicted())]
        everything[name] = found
        text = f"{text_of(figure, found)}\n\nRounds: {options.rounds}. Machine: {machine_line}."
        print(f"{name}\n\n{text}\n", flush=True)
        if options.write_docs:
            if (
                f"paper-{name}:begin" in Path(options.write_docs).read_text()
            ):  # for others, the chart is enough
                write_between_markers(options.write_docs, f"paper-{name}", text)
            draw(os.path.join(options.pictures, f"paper-{name}.png"), figure, found, machine_line)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(everything, file, indent=1)


if __name__ == "__main__":
    main()
