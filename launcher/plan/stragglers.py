"""How much longer the slowest of many ranks takes.

The steps of one rank vary. All ranks wait for the slowest one, so the mean step of a job is the expected maximum of as
many samples as there are ranks. Few samples are measured, and jobs have thousands of ranks, so the maximum comes from a
distribution: normal, with the median and the median deviation of the samples. Both ignore rare outliers of the
profiled machine. Ranks are assumed to be independent.
"""

from __future__ import annotations

from statistics import NormalDist, median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_TO_SIGMA = 1.4826  # of the median absolute deviation, for a normal distribution


def deviation(samples: Sequence[float]) -> float:
    middle = median(samples)
    return _TO_SIGMA * median(abs(sample - middle) for sample in samples)


def slowest(samples: Sequence[float], ranks: int) -> float:
    """How much longer than the median the slowest of `ranks` ranks takes, on average, in seconds."""
    if ranks == 1:
        return 0.0
    # The expected maximum of n normal values, by Blom's approximation.
    return deviation(samples) * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
