"""Two launchers doing the same thing in turns, and what that says.

Theory of operation
-------------------
A machine is never quiet: clocks change, neighbours come and go. So both launchers run in every round, one right
after the other, in an order that alternates; a ratio is taken within a round, and the figure that counts is the
median of these ratios. Their smallest and largest are shown beside it. The first round only fills the page cache.
A run that fails or hangs has no figure; it is counted in the table, never left out of it.
"""

from __future__ import annotations

import os
import statistics
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from watched import Hung, RunFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_BESIDE_PYTHON = os.path.dirname(sys.executable)


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    command: str
    env: tuple[tuple[str, str], ...] = ()

    def argv(self, *args: str) -> list[str]:
        return [os.path.join(_BESIDE_PYTHON, self.command), "--standalone", *args]


TORCHRUN = Contender("torchrun", "torchrun")
DDP_LAUNCH = Contender("ddp-launch", "ddp-launch")


@dataclass(frozen=True, slots=True)
class Quantity:
    """`ratio` is the target for ours over theirs, `limit` one for ours alone."""

    key: str
    title: str
    unit: str = "s"
    ratio: float | None = None
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class Run:
    figures: dict[str, float] = field(default_factory=dict)
    problem: str = ""
    hung: bool = False


@dataclass(frozen=True, slots=True)
class Round:
    theirs: Run
    ours: Run


@dataclass(frozen=True, slots=True)
class Comparison:
    """One row: medians of both, and the ratios of the rounds in which both have a figure."""

    quantity: Quantity
    theirs: list[float]
    ours: list[float]
    ratios: list[float]

    @property
    def verdict(self) -> str:
        quantity = self.quantity
        if quantity.ratio is None and quantity.limit is None:
            return ""
        values, target = (
            (self.ratios, quantity.ratio) if quantity.limit is None else (self.ours, quantity.limit)
        )
        if not values or target is None:
            return "no figure"
        return "met" if statistics.median(values) <= target else "not met"


def play(
    measure: Callable[[Contender], dict[str, float]],
    theirs: Contender,
    ours: Contender,
    rounds: int,
    warm_up: int,
) -> list[Round]:
    played = []
    for number in range(-warm_up, rounds):
        found = play_round(measure, theirs, ours, number)
        if number >= 0:
            played.append(found)
    return played


def play_round(
    measure: Callable[[Contender], dict[str, float]], theirs: Contender, ours: Contender, number: int
) -> Round:
    """`number` is negative for a round that only warms up."""
    runs = play_all(measure, (theirs, ours), number)
    return Round(runs[theirs.name], runs[ours.name])


def play_all(
    measure: Callable[[Contender], dict[str, float]], contenders: Sequence[Contender], number: int
) -> dict[str, Run]:
    """One round of them, in an order that alternates."""
    order = contenders if number % 2 == 0 else contenders[::-1]
    runs = {contender.name: _attempt(measure, contender) for contender in order}
    for name, run in runs.items():
        _say(number, name, run)
    return runs


def _attempt(measure: Callable[[Contender], dict[str, float]], contender: Contender) -> Run:
    try:
        return Run(measure(contender))
    except RunFailed as failure:
        return Run(problem=str(failure), hung=isinstance(failure, Hung))


def _say(number: int, name: str, run: Run) -> None:
    label = f"round {number + 1}" if number >= 0 else "warm-up"
    figures = "  ".join(f"{key} {value:.3f}" for key, value in run.figures.items())
    print(f"{label:>8}  {name:<10}  {figures or run.problem}", file=sys.stderr, flush=True)


def compare(quantity: Quantity, rounds: Sequence[Round]) -> Comparison:
    key = quantity.key
    pairs = [(r.theirs.figures.get(key), r.ours.figures.get(key)) for r in rounds]
    return Comparison(
        quantity,
        [theirs for theirs, _ in pairs if theirs is not None],
        [ours for _, ours in pairs if ours is not None],
        [ours / theirs for theirs, ours in pairs if theirs and ours is not None],
    )


@dataclass(frozen=True, slots=True)
class Finding:
    """One table with its rounds."""

    title: str
    quantities: tuple[Quantity, ...]
    rounds: list[Round]

    @property
    def comparisons(self) -> list[Comparison]:
        return [compare(quantity, self.rounds) for quantity in self.quantities]
