"""What ranks found in their numbers, in words that are the same on all of them: gradients that are not finite, and
parameters that are no longer the same everywhere."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST_RANKS = 8


@dataclass(frozen=True, slots=True)
class Finding:
    """What one rank saw in its own gradients, before they were averaged."""

    rank: int
    first: int  # the parameter whose gradient came first of those that are not finite
    is_nan: bool  # that one holds a NaN; else an infinity
    count: int  # how many parameters are concerned


def of_gradients(findings: Sequence[Finding], names: Sequence[str], step: int) -> str:
    """`findings`: of the ranks that have something to tell, in order of their numbers; at least one."""
    shown = "; ".join(_one(finding, names) for finding in findings[:_MOST_RANKS])
    more = f"; and {len(findings) - _MOST_RANKS} more ranks" if len(findings) > _MOST_RANKS else ""
    return (
        f"gradients that are not finite, in averaged step {step}: {shown}{more}. {_advice(findings, names)}"
    )


def _one(finding: Finding, names: Sequence[str]) -> str:
    what = "NaN" if finding.is_nan else "Inf"
    others = finding.count - 1
    more = "" if not others else f" (first in this backward; {others} of the {len(names) - 1} others as well)"
    return f"rank {finding.rank} has {what} in the gradient of {names[finding.first]}{more}"


def _advice(findings: Sequence[Finding], names: Sequence[str]) -> str:
    if all(finding.count == len(names) for finding in findings):
        return (
            "No gradient of theirs is finite: look at the loss and at the input of this step on those ranks."
        )
    return "The other ranks' gradients were finite: look at what these ranks were given in this step."


# --- replicas ------------------------------------------------------------------------------------------


def odd_ones(values: Sequence[int]) -> tuple[tuple[int, ...], bool]:
    """-> the ranks that hold another value than most do, and whether most do: else there are only sides."""
    (common, times), *_ = Counter(values).most_common()
    odd = tuple(rank for rank, value in enumerate(values) if value != common)
    return odd, 2 * times > len(values)


def of_replicas(name: str, values: Sequence[int], others: int, step: int) -> str:
    """`values`: what each rank's copy of the parameter comes to; `others`: how many more parameters differ."""
    odd, most_agree = odd_ones(values)
    more = f", and so {'do' if others > 1 else 'does'} {others} more" if others else ""
    head = f"the replicas are no longer the same, seen after averaged step {step}: parameter {name} differs{more}. "
    if most_agree:
        ranks = f"rank{'s' if len(odd) > 1 else ''} {_listed(odd)}"
        return f"{head}It is {ranks} that {'differ' if len(odd) > 1 else 'differs'} from all others."
    return f"{head}{_sides(values)}; with no majority nobody can say which of them is right."


def _sides(values: Sequence[int]) -> str:
    sides: dict[int, list[int]] = {}
    for rank, value in enumerate(values):
        sides.setdefault(value, []).append(rank)
    shown = [_listed(ranks) for ranks in list(sides.values())[:_MOST_RANKS]]
    more = f" against {len(sides) - _MOST_RANKS} more values" if len(sides) > _MOST_RANKS else ""
    return "Ranks " + " against ".join(shown) + more


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_RANKS]))
    return shown + (f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else "")
