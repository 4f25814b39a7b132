"""The profile of a step: what the ranks have recorded, as values."""

from __future__ import annotations

import json
from dataclasses import dataclass
from statistics import median
from typing import Any

FORMAT = 1


class BadProfile(ValueError):
    """The file is not a profile that this release can read."""


@dataclass(frozen=True)
class Gradient:
    nbytes: int
    ready_s: float  # after the start of the backward


@dataclass(frozen=True)
class Profile:
    """One step of one rank without communication between nodes.

    `gradients` are in the order in which they become ready. `backward_s` ends with the last gradient. `rest_s` is the
    remainder of a step: data, forward, optimizer, and the script's own work.
    """

    gradients: tuple[Gradient, ...]
    backward_s: float
    rest_s: float
    step_samples: tuple[float, ...]  # the computing of single steps, of all ranks
    ranks: int
    device: str
    # Bytes and seconds of all-reduces between the ranks of this machine; empty for one rank.
    inside: tuple[tuple[int, float], ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(gradient.nbytes for gradient in self.gradients)

    @property
    def compute_s(self) -> float:
        return self.backward_s + self.rest_s


def merged(records: list[dict[str, Any]]) -> Profile:
    """Merge the records of the ranks. The rank with the median step is the one whose gradients are used."""
    steps = sorted(records, key=lambda record: median(_computing(record)))
    middle = steps[len(steps) // 2]
    gradients = sorted(
        (Gradient(int(nbytes), float(ready)) for nbytes, ready in middle["gradients"]),
        key=lambda gradient: gradient.ready_s,
    )
    backward = max((gradient.ready_s for gradient in gradients), default=0.0)
    samples = tuple(seconds for record in records for seconds in _computing(record))
    return Profile(
        tuple(gradients),
        backward,
        max(0.0, median(_computing(middle)) - backward),
        samples,
        len(records),
        str(middle["device"]),
        tuple((int(nbytes), float(seconds)) for nbytes, seconds in middle.get("inside", ())),
    )


def _computing(record: dict[str, Any]) -> list[float]:
    return [float(seconds) for seconds in record["steps"]]


def to_text(profile: Profile) -> str:
    fields = {
        "format": FORMAT,
        "gradients": [[one.nbytes, one.ready_s] for one in profile.gradients],
        "backward_s": profile.backward_s,
        "rest_s": profile.rest_s,
        "step_samples": list(profile.step_samples),
        "ranks": profile.ranks,
        "device": profile.device,
        "inside": [list(point) for point in profile.inside],
    }
    return json.dumps(fields, indent=1)


def from_text(text: str) -> Profile:
    """Read what `to_text` has written; raise `BadProfile` with the reason."""
    try:
        fields = json.loads(text)
        if fields["format"] != FORMAT:
            raise BadProfile(f"its format is {fields['format']}, and this release reads format {FORMAT}")
        profile = Profile(
            tuple(Gradient(int(nbytes), float(ready)) for nbytes, ready in fields["gradients"]),
            float(fields["backward_s"]),
            float(fields["rest_s"]),
            tuple(map(float, fields["step_samples"])),
            int(fields["ranks"]),
            str(fields["device"]),
            tuple((int(nbytes), float(seconds)) for nbytes, seconds in fields["inside"]),
        )
    except BadProfile:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadProfile(
            f"it is not a profile of `ddp-launch plan` ({type(error).__name__}: {error})"
        ) from None
    if not profile.gradients or not profile.step_samples or profile.compute_s <= 0:
        raise BadProfile("it contains no gradients or no steps")
    return profile
