"""One case under two classes: what is different, in words."""

from __future__ import annotations

import importlib
import os
import re
from typing import TYPE_CHECKING

import register
from pool import Task, pool_of
from transcript import ENDED, Transcript, differences, disagreements

if TYPE_CHECKING:
    from register import Case, Divergence

# Another class in the place of ours, as module:Class; "torch" compares torch with itself.
SECOND = os.environ.get("DDP_CONTRACT_SIDE", "ours")
MODULES = [
    *("cases_training", "cases_models", "cases_gradients", "cases_graphs", "cases_construction"),
    *(
        "cases_buffers",
        "cases_hooks",
        "cases_join",
        "cases_misuse",
        "cases_better",
        "cases_delayed",
        "cases_outside",
        "cases_state",
        "cases_compiled",
        "cases_narrow",
    ),
]


def load_cases() -> tuple[list[Case], list[Divergence]]:
    for name in MODULES:
        importlib.import_module(name)
    return register.CASES, register.DIVERGENCES


def seen(case: Case, world_size: int, side: str, backend: str = "gloo") -> list[Transcript]:
    task = Task(case.module, case.function, side, case.arguments, backend=backend)
    return pool_of(world_size).run(task)


def compare(case: Case, world_size: int, second: str = SECOND, over: str = "gloo") -> list[str]:
    """Empty where the two classes cannot be told apart by this case. torch's is always over Gloo."""
    torchs, ours = seen(case, world_size, "torch"), seen(case, world_size, second, over)
    found = [
        f"a case must note its errors: {each.remarked(ENDED)}" for each in torchs if each.remarked(ENDED)
    ]
    found += [f"torch itself, between ranks: {each}" for each in disagreements(torchs)]
    found += [f"between ranks: {each}" for each in disagreements(ours)]
    for number, (one, other) in enumerate(zip(torchs, ours, strict=True)):
        exact = case.exact and world_size == 2
        found += [f"rank {number}: {each}" for each in differences(one, other, exact)]
        found += [f"rank {number}: {each}" for each in unsaid(case, other) if second != "torch"]
    return found


def unsaid(case: Case, transcript: Transcript) -> list[str]:
    """What our messages leave out of what they promise to name."""
    found = []
    for label, patterns in case.says.items():
        text = transcript.remarked(label)
        found += [f"{label}: nothing about {p!r} in: {text}" for p in patterns if not re.search(p, text)]
    return found


def outcome(case: Case, side: str, over: str = "gloo") -> tuple[set[str], list[str]]:
    transcripts = seen(case, case.world_sizes[0], side, over)
    outcomes = {str(dict(each.notes).get("outcome", dict(each.notes))) for each in transcripts}
    remarks = [f"{label}: {text}" for each in transcripts for label, text in each.remarks]
    missing = [m for each in transcripts for m in unsaid(case, each)] if side != "torch" else []
    return outcomes, remarks + missing
