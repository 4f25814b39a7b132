"""The parts of `make gpu`, in the order in which they run: tests, faults, benchmarks.

`usual_s` is what a part takes on one card, `limit_s` when it is stopped. All `usual_s` together stay below 25 minutes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpu_cases import CASES

if TYPE_CHECKING:
    from collections.abc import Collection

TOTAL_S = 25 * 60


@dataclass(frozen=True)
class Part:
    name: str
    shows: str
    program: str  # a file beside this one
    words: tuple[str, ...] = ()
    usual_s: float = 20.0
    limit_s: float = 60.0


_TESTS = (
    Part("machine", "what is here; doctor's checks of the GPUs", "gpu_doctor.py", usual_s=25, limit_s=120),
    Part(
        "sharing",
        "how several NCCL ranks get on with one card",
        "gpu_sharing.py",
        usual_s=30,
        limit_s=120,
    ),
    Part(
        "collectives",
        "2 and 4 ranks: each collective returns what it should",
        "gpu_checks.py",
        ("collectives", "2", "4"),
        usual_s=35,
        limit_s=120,
    ),
    Part(
        "like-torch",
        "1, 2 and 4 ranks: our DDP trains as torch's does, in its options",
        "gpu_checks.py",
        ("like_torch", "1", "2", "4"),
        usual_s=75,
        limit_s=180,
    ),
    Part("tests", "the tests marked `gpu`", "gpu_tests.py", usual_s=90, limit_s=240),
)
_FAULTS = tuple(
    Part(f"fault-{case.name}", case.injected, "gpu_play.py", (case.name,), 18, 120) for case in CASES
)
_BENCHES = (
    Part("launch", "8 ranks on one card: launch beside torchrun", "gpu_launch.py", ("launch",), 90, 180),
    Part(
        "first-step",
        "2 ranks over NCCL: launch to the first training step, beside torchrun",
        "gpu_launch.py",
        ("first-step",),
        75,
        180,
    ),
    Part(
        "restart",
        "death of a rank to the first step, beside torchrun",
        "gpu_launch.py",
        ("restart",),
        100,
        240,
    ),
    Part(
        "heal",
        "death of a rank to the next step of a compiled GPT of 124M, the others in place, beside torchrun",
        "gpu_launch.py",
        ("heal",),
        50,
        240,
    ),
    *(
        Part(
            f"reducer-{model}-{ranks}",
            f"{title}, {ranks} rank{'s' * (ranks > 1)}: our reducer beside torch's",
            "gpu_reducer.py",
            ("reducer.py", str(ranks), model),
            30 if ranks < 4 else 40,
            90 if ranks < 4 else 120,
        )
        for ranks in (1, 2, 4)
        for model, title in (
            ("many", "2,000 small parameters"),
            ("gpt", "GPT of 124M"),
            ("resnet", "ResNet-50"),
        )
    ),
    *(
        Part(
            f"reducer-{model}-compiled",
            f"{title} with torch.compile: our reducer beside torch's",
            "gpu_reducer.py",
            ("reducer.py", "1", model, "--compile"),
            80,
            240,
        )
        for model, title in (("gpt", "GPT of 124M"), ("resnet", "ResNet-50"))
    ),
    Part(
        "commit",
        "how long an elastic commit holds up training",
        "gpu_reducer.py",
        ("commit.py", "1"),
        30,
        150,
    ),
    Part(
        "watched",
        "what it costs to be watched, with a step of 10 ms",
        "gpu_watched.py",
        usual_s=60,
        limit_s=150,
    ),
)
PARTS: tuple[Part, ...] = (*_TESTS, *_FAULTS, *_BENCHES)
BY_NAME = {part.name: part for part in PARTS}


class NoSuchPart(Exception):
    pass


def chosen(words: list[str]) -> list[str]:
    """The names of the parts that `words` select: whole names, or the beginning of several (`fault-`)."""
    if not words:
        return list(BY_NAME)
    found: list[str] = []
    for word in words:
        fitting = [word] if word in BY_NAME else [name for name in BY_NAME if name.startswith(word)]
        if not fitting:
            raise NoSuchPart(f"there is no part {word!r}. The parts are: {', '.join(BY_NAME)}")
        found += fitting
    return [name for name in BY_NAME if name in found]


def with_what_they_need(names: list[str], known: Collection[str]) -> list[str]:
    """Parts with several ranks ask how ranks share a card. `known`: the parts that have results."""
    asks = any(name not in ("machine", "sharing") for name in names)
    return ["sharing", *names] if asks and "sharing" not in (*known, *names) else names


def allowance_s(part: Part, left_s: float) -> float | None:
    """How long the part may take if so much time is left; None if it should not begin."""
    if left_s < part.usual_s:
        return None
    return min(part.limit_s, left_s)
