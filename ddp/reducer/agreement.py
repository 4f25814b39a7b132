"""Check that all ranks wrap the same model in the same way.

The check runs at construction and when the buckets are rebuilt. A difference raises an error that names the
parameter or the option. Without the check, a collective would hang.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import TYPE_CHECKING, Any

import torch

from ddp.groups import joining
from ddp.reducer import plan
from ddp.reducer.collectives import broadcast_from_rank_0, gather_rows
from ddp.reducer.replica_errors import different_plans
from ddp.telemetry.coded import WrongUse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    Options = Sequence[tuple[str, object]]

_wrappers = itertools.count(1)


def same_model(
    group: ProcessGroup,
    device: torch.device,
    parameters: Sequence[plan.ParameterInfo],
    state: Sequence[plan.Entry],
    options: Options,
) -> int:
    """Raise if the ranks wrap different models. Return rank 0's number of this wrapper, on all ranks.

    Full descriptions are gathered only if the fingerprints differ.
    """
    facts = [dataclasses.asdict(each) for each in parameters]
    text = json.dumps([facts, list(state), list(options)]).encode()
    mine = [
        plan.model_fingerprint(parameters, [("state", tuple(state)), *options]),
        len(text),
        next(_wrappers),
    ]
    answers = gather_rows(group, torch.tensor(mine, dtype=torch.int64, device=device))
    identity = answers[0][2]
    if all(answer[0] == mine[0] for answer in answers):
        return identity
    longest = max(int(answer[1]) for answer in answers)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    texts = gather_rows(group, padded)
    described = [json.loads(bytes(row[: int(answer[1])])) for row, answer in zip(texts, answers, strict=True)]
    models = [[_facts(entry) for entry in entries] for entries, _, _ in described]
    settings = [[(str(name), value) for name, value in chosen] for _, _, chosen in described]
    difference = plan.disagreement(models, settings) or plan.first_unlike([sent for _, sent, _ in described])
    if difference:
        raise WrongUse(difference)
    return identity


def _facts(entry: dict[str, Any]) -> plan.ParameterInfo:
    return plan.ParameterInfo(**{**entry, "sizes": tuple(entry["sizes"]), "strides": tuple(entry["strides"])})


def order_of_rank_0(group: ProcessGroup, device: torch.device, order: Sequence[int]) -> list[int]:
    """Return on every rank the numbers of rank 0."""
    if joining.is_alone():  # the other ranks do the same with the same numbers
        return list(order)
    numbers = torch.tensor(order, dtype=torch.int32, device=device)
    broadcast_from_rank_0(group, numbers)
    agreed: list[int] = numbers.tolist()
    return agreed


def same_plan(group: ProcessGroup, device: torch.device, number: int) -> None:
    """Raise unless all ranks pass the same `number`."""
    if joining.is_alone():
        return
    if any(
        row != [number]
        for row in gather_rows(group, torch.tensor([number], dtype=torch.int64, device=device))
    ):
        raise different_plans(group.rank())
