"""How long each part of a heal took, from the loss of a node to the first step of all ranks of the next world.

The parts come from two clocks, which are one on this machine: the events of the service, as `ddpctl events` prints
them, and what the ranks of programs/many.py tell.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# The event at the end of each part; the ranks tell the last two.
PARTS = {
    "decision": "detect: the lease of the node expires, and the decision is stored",
    "stopped": "stop: the ranks that are left are paused",
    "sealed": "meet: the next world is sealed",
    "running": "its store is open",
    "began": "continue: all ranks are in `train` again, the new ones too",
    "stepped": "first step: all ranks have finished one",
}


@dataclass(frozen=True)
class Loss:
    """A node is lost at `at`, and the next world is the one of `generation`."""

    title: str
    at: float
    generation: int


def seconds(
    loss: Loss, events: Sequence[Mapping[str, Any]], worlds: Mapping[int, Mapping[int, Mapping[str, Any]]]
) -> dict[str, float]:
    """When each part had ended, counted from the loss. Raises `KeyError` for a part without an end."""
    ends: dict[str, float] = {}
    for event in events:
        if event["at"] >= loss.at and event["kind"] in PARTS:
            ends.setdefault(event["kind"], event["at"])
    ranks = worlds[loss.generation].values()
    ends["began"] = max(rank["began_at"] for rank in ranks)
    ends["stepped"] = max(rank["stepped_at"] for rank in ranks)
    return {part: ends[part] - loss.at for part in PARTS}


def table(found: Mapping[str, Mapping[str, float]]) -> str:
    """`found`: by the title of the loss, then by part."""
    lines = [f"| seconds after the loss of a node | {' | '.join(found)} |", "|---|" + "---:|" * len(found)]
    for part, words in PARTS.items():
        lines.append(f"| {words} | {' | '.join(f'{of[part]:.2f}' for of in found.values())} |")
    return "\n".join(lines)
