"""Sums that a rank has formed before the backward whose gradients complete them (`ddp/elastic/logical_sums.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


class PartialSums(Protocol):
    """The sum over all ranks is divided by `divisor`, after it is complete: a factor before would round twice."""

    divisor: float

    def fold(self, members: Sequence[int]) -> None:
        """Add the sums to the gradients of these parameters. It is called once for each before it is sent."""
