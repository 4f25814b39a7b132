"""The figures of the DDP paper, of what was measured here: latency breakdown, latency by bucket size, skipping
synchronisation. (All-reduce time by size is drawn by bench/allreduce.py.)"""

from __future__ import annotations

import os
import statistics
import textwrap
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

if TYPE_CHECKING:
    from trial import Figures

COLORS = {"torch, Gloo": "#b0b0b0", "ours, Gloo": "#7fb0d8", "ours, shm": "#1f6fb2"}
PHASES = {"forward": "#c9d7a8", "backward": "#8fb35c", "exposed": "#c0392b", "optimizer": "#7a6a9b"}
TITLES = {
    "steps": "latency breakdown",
    "buckets": "by bucket size, MiB",
    "no-sync": "a micro-batch, synchronised",
}


def draw(path: str, found: list[Any], machine_line: str) -> None:
    """`found`: what bench/ddp.py found, of the smallest number of ranks."""
    fewest = min(one.ranks for one in found)
    shown = [one for one in found if one.part in TITLES and one.ranks == fewest]
    if not shown:
        return
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(4.6 * columns, 3.2 * rows), squeeze=False, layout="constrained"
    )
    for axis in list(axes.flat)[len(shown) :]:
        axis.set_axis_off()
    for axis, one in zip(axes.flat, shown, strict=False):
        axis.set_title(f"{one.model}, {one.ranks} ranks: {TITLES[one.part]}", fontsize=9)
        axis.set_ylabel("ms", fontsize=8)
        (_breakdown if one.part == "steps" else _lines)(axis, one.figures)
    figure.supxlabel("\n".join(textwrap.wrap(machine_line, 150)), fontsize=7, color="#606060")
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _breakdown(axis: Any, figures: Figures) -> None:
    alone = figures.median("alone", "backward")
    floor = dict.fromkeys(COLORS, 0.0)
    parts = {
        name: {phase: figures.median(name, phase) * 1e3 for phase in PHASES if phase != "exposed"}
        for name in COLORS
    }
    for phase, color in PHASES.items():
        heights = []
        for name in COLORS:
            exposed = max(0.0, parts[name]["backward"] - alone * 1e3)
            height = exposed if phase == "exposed" else parts[name][phase] - exposed * (phase == "backward")
            heights.append(height)
        axis.bar(list(COLORS), heights, 0.6, bottom=list(floor.values()), color=color, label=phase)
        floor = {name: below + height for (name, below), height in zip(floor.items(), heights, strict=True)}
    axis.tick_params(labelsize=7)
    axis.legend(fontsize=6)


def _lines(axis: Any, figures: Figures) -> None:
    for name, color in COLORS.items():
        steps = {
            full.removeprefix(f"{name}, "): [turn["step"] * 1e3 for turn in turns]
            for full, turns in figures.taken.items()
            if full.startswith(f"{name}, ")
        }
        medians = [statistics.median(values) for values in steps.values()]
        below = [median - min(values) for median, values in zip(medians, steps.values(), strict=True)]
        above = [max(values) - median for median, values in zip(medians, steps.values(), strict=True)]
        axis.errorbar(
            list(steps), medians, (below, above), fmt="o-", color=color, label=name, capsize=2, ms=3
        )
    axis.set_ylim(bottom=0)
    axis.tick_params(labelsize=7)
    axis.legend(fontsize=6)
