"""A case is a function of a trial; this is the list of them, by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Case:
    name: str
    module: str
    function: str
    arguments: tuple[Any, ...] = ()
    world_sizes: tuple[int, ...] = (2,)
    # Bits are compared where the order of a sum cannot matter: two ranks add two numbers.
    exact: bool = True
    # What our message must name: label of the note -> patterns. torch's own need not.
    says: dict[str, list[str]] = field(default_factory=dict)
    nightly: bool = False


@dataclass(frozen=True)
class Divergence:
    """Where we promise more than torch: what `outcome` is under torch, and what it may be under ours."""

    case: Case
    torch: tuple[str, ...]
    ours: tuple[str, ...]


CASES: list[Case] = []
DIVERGENCES: list[Divergence] = []


def case(
    *world_sizes: int,
    says: dict[str, list[str]] | None = None,
    nightly: bool = False,
    **variants: tuple[Any, ...],
) -> Callable[[Any], Any]:
    """Each variant is one case: its name is added to the function's, its values are the arguments."""

    def enter(function: Any) -> Any:
        for variant, arguments in (variants or {"": ()}).items():
            name = f"{function.__name__}-{variant}" if variant else function.__name__
            CASES.append(
                Case(
                    name,
                    function.__module__,
                    function.__name__,
                    arguments,
                    world_sizes or (2,),
                    says=says or {},
                    nightly=nightly,
                )
            )
        return function

    return enter


def better(
    torch: str | tuple[str, ...],
    ours: str | tuple[str, ...],
    says: dict[str, list[str]] | None = None,
    world_size: int = 2,
) -> Callable[[Any], Any]:
    """For a case that notes one `outcome`; several where it is not settled. torch=() where torch ends the process."""

    def enter(function: Any) -> Any:
        name = function.__name__
        made = Case(name, function.__module__, name, world_sizes=(world_size,), says=says or {})
        torchs, mine = ((each,) if isinstance(each, str) else each for each in (torch, ours))
        DIVERGENCES.append(Divergence(made, torchs, mine))
        return function

    return enter


def same(outcome: str | tuple[str, ...]) -> Callable[[Any], Any]:
    """For a case that torch's class gets wrong, or refuses: so does ours, it does not communicate more."""
    return better(torch=outcome, ours=outcome)
