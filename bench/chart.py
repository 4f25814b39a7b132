"""What was measured as a picture.

`draw`: on the left the amounts, on the right every round's ratio beside its target. `draw_bars`: amounts of several
contestants, on a logarithmic scale.
"""

from __future__ import annotations

import os
import statistics
import textwrap
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidebyside import Comparison, Finding

_COLORS = {"torchrun": "#b0b0b0", "ddp-launch": "#1f6fb2"}
_TARGET = "#c0392b"
_OTHERS = ("#b0b0b0", "#d08a2e", "#6a9a58")


def draw(path: str, findings: Sequence[Finding], machine_line: str) -> None:
    figure, axes = pyplot.subplots(
        len(findings), 2, figsize=(11, 0.6 + 2.6 * len(findings)), squeeze=False, layout="constrained"
    )
    for (left, right), finding in zip(axes, findings, strict=True):
        rows = [row for row in finding.comparisons if row.theirs and row.ours]
        left.set_title(f"{finding.title}: medians, min and max")
        right.set_title("ddp-launch / torchrun, each round")
        _amounts(left, rows)
        _ratios(right, rows)
    figure.supxlabel("\n".join(textwrap.wrap(machine_line, 150)), fontsize=7, color="#606060")
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _amounts(axis: Any, rows: list[Comparison]) -> None:
    for shift, name in ((0.2, "torchrun"), (-0.2, "ddp-launch")):
        samples = [row.theirs if name == "torchrun" else row.ours for row in rows]
        medians = [statistics.median(values) for values in samples]
        below = [median - min(values) for median, values in zip(medians, samples, strict=True)]
        above = [max(values) - median for median, values in zip(medians, samples, strict=True)]
        places = [-number + shift for number in range(len(rows))]
        axis.barh(places, medians, 0.38, xerr=(below, above), color=_COLORS[name], label=name, capsize=2)
    _label_rows(axis, rows)
    axis.set_xlabel(" and ".join(dict.fromkeys(row.quantity.unit for row in rows)))
    axis.legend(fontsize=8)


def _ratios(axis: Any, rows: list[Comparison]) -> None:
    for number, row in enumerate(rows):
        axis.plot(row.ratios, [-number] * len(row.ratios), "o", color=_COLORS["ddp-launch"], alpha=0.5)
        if row.ratios:
            axis.plot([statistics.median(row.ratios)], [-number], "|", color="black", markersize=22)
        if row.quantity.ratio is not None:
            axis.plot([row.quantity.ratio], [-number], "|", color=_TARGET, markersize=22, markeredgewidth=3)
    _label_rows(axis, rows)
    axis.tick_params(labelleft=False)
    axis.set_xlim(left=0)
    axis.set_xlabel("black: median, red: target")
    axis.grid(axis="x", alpha=0.3)


def _label_rows(axis: Any, rows: list[Comparison]) -> None:
    axis.set_yticks(
        [-number for number in range(len(rows))], [row.quantity.title for row in rows], fontsize=8
    )
    axis.set_ylim(-len(rows) + 0.4, 0.6)


def draw_bars(
    path: str, panels: dict[str, dict[str, dict[str, float]]], unit: str, machine_line: str
) -> None:
    """`panels`: by their title, then by contestant and row."""
    rows = list(dict.fromkeys(row for panel in panels.values() for bars in panel.values() for row in bars))
    figure, axes = pyplot.subplots(
        1,
        len(panels),
        figsize=(4.2 * len(panels), 1.2 + 0.55 * len(rows)),
        squeeze=False,
        layout="constrained",
    )
    for axis, (title, panel) in zip(axes[0], panels.items(), strict=True):
        height = 0.8 / len(panel)
        for number, (name, bars) in enumerate(panel.items()):
            places = [-rows.index(row) + 0.4 - height * (number + 0.5) for row in bars]
            color = _COLORS["ddp-launch"] if number == 0 else _OTHERS[(number - 1) % len(_OTHERS)]
            axis.barh(places, list(bars.values()), height, color=color, label=name)
        axis.set_title(title, fontsize=10)
        axis.set_xscale("log")
        axis.set_xlabel(unit)
        axis.grid(axis="x", alpha=0.3)
        axis.set_yticks([-number for number in range(len(rows))], rows, fontsize=8)
        axis.tick_params(labelleft=axis is axes[0][0])
    axes[0][-1].legend(fontsize=8)
    figure.supxlabel("\n".join(textwrap.wrap(machine_line, 150)), fontsize=7, color="#606060")
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
