"""Pure functions for the texts of numerics errors: non-finite gradients, and replicas that differ."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp.telemetry.coded import listed

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_RANKS = 8


@dataclass(frozen=True, slots=True)
class RankNumerics:
    """The non-finite gradients of one rank, before averaging."""

    rank: int
    first: int  # of the non-finite gradients, the parameter whose gradient arrived first
    is_nan: bool  # whether that gradient has a NaN; else it has an Inf
    count: int  # number of parameters with a non-finite gradient


def report_gradients(reports: Sequence[RankNumerics], names: Sequence[str], step: int) -> str:
    """`reports`: one for each rank with a non-finite gradient, ordered by rank; at least one."""
    shown = "; ".join(_describe(report, names) for report in reports[:_MAX_RANKS])
    more = f"; and {len(reports) - _MAX_RANKS} more ranks" if len(reports) > _MAX_RANKS else ""
    return f"non-finite gradients in {_step(step)}: {shown}{more}. {_advise(reports, names)}"


def _step(number: int) -> str:
    return f"step {number} (steps under no_sync() are not counted)"


def _describe(report: RankNumerics, names: Sequence[str]) -> str:
    what = "NaN" if report.is_nan else "Inf"
    others = report.count - 1
    more = (
        ""
        if not others
        else (f" (computed first; {others} of the other {len(names) - 1} gradients are non-finite too)")
    )
    return f"rank {report.rank} has {what} in the gradient of {names[report.first]}{more}"


def _advise(reports: Sequence[RankNumerics], names: Sequence[str]) -> str:
    if all(report.count == len(names) for report in reports):
        return "All gradients of these ranks are non-finite: check the loss and the input of this step on these ranks."
    return (
        "The gradients of all other ranks are finite: check the input of this step on the ranks named above."
    )


# --- replicas ------------------------------------------------------------------------------------------


def find_minority(values: Sequence[int]) -> tuple[tuple[int, ...], bool]:
    """Return the ranks whose value is not the most common one, and whether that value has a majority."""
    (common, times), *_ = Counter(values).most_common()
    minority = tuple(rank for rank, value in enumerate(values) if value != common)
    return minority, 2 * times > len(values)


def report_replicas(name: str, values: Sequence[int], others: int, step: int) -> str:
    """`values`: the hash of each rank's copy of the parameter; `others`: how many more parameters differ."""
    minority, has_majority = find_minority(values)
    more = f" (and {others} more parameter{'s' * (others != 1)})" if others else ""
    head = f"the replicas differ after {_step(step)}: parameter {name}{more}. "
    if has_majority:
        ranks = f"rank{'s' if len(minority) > 1 else ''} {listed(minority, _MAX_RANKS)}"
        found = f"Only {ranks} {'differ' if len(minority) > 1 else 'differs'} from the majority of the ranks."
    else:
        found = f"{_group_ranks(values)}. No value has a majority, so it is unknown which ranks are right."
    return (
        f"{head}{found} Check for code that changes parameters on some ranks only. Restore all ranks from the last "
        "checkpoint."
    )


def _group_ranks(values: Sequence[int]) -> str:
    by_value: dict[int, list[int]] = {}
    for rank, value in enumerate(values):
        by_value.setdefault(value, []).append(rank)
    shown = [listed(ranks, _MAX_RANKS) for ranks in list(by_value.values())[:_MAX_RANKS]]
    more = f"; {len(by_value) - _MAX_RANKS} more values" if len(by_value) > _MAX_RANKS else ""
    return "Ranks with equal values: " + "; ".join(shown) + more
