"""Time to meet and the cost of staying, by number of agents."""

from __future__ import annotations

import os
import textwrap
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from __main__ import Played

_COLORS = {
    "c10d": "#b0b0b0",
    "memory": "#1f6fb2",
    "file": "#2e8b57",
    "etcd": "#8e44ad",
}
_LABELS = {"c10d": "torch's c10d"}


def draw(path: str, played: Sequence[Played], machine_line: str) -> None:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    left.set_title("all set off at once: until the last is ready")
    right.set_title("one heartbeat per second and agent")
    _lines(left, played, "ready")
    _lines(right, played, "heartbeats_cpu")
    left.set_yscale("log")
    left.set_ylabel("s")
    right.set_ylabel("service, % of one CPU")
    right.set_ylim(bottom=0)
    figure.supxlabel("\n".join(textwrap.wrap(machine_line, 150)), fontsize=7, color="#606060")
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _lines(axis: Any, played: Sequence[Played], key: str) -> None:
    for name, color in _COLORS.items():
        points = [(p.nodes, p.median(key)) for p in played if p.contender == name and p.values(key)]
        if points:
            axis.plot(*zip(*points, strict=True), "o-", color=color, label=_LABELS.get(name, name))
    axis.set_xscale("log")
    axis.set_xlabel("agents")
    axis.grid(alpha=0.3)
    if axis.lines:
        axis.legend(fontsize=8)
