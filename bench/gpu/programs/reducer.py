"""A rank of the parts `reducer-*`: the same model under torch's DDP, under ours, and alone.

reducer.py MODEL [--compile]
"""

from __future__ import annotations

import statistics
import sys
from operator import truediv
from typing import Any

import rank
import torch
import turns
from gpu_models import MODELS, TITLES

import ddp

_NO_SLOWER, _FASTER = 1.0, 0.97
_COMMUNICATION_SHOWS = 1.05  # torch's step over that of a model that communicates nothing
_LIMIT_US = 3.0  # of CPU time for a parameter


def main() -> None:
    model, compiles = sys.argv[1], "--compile" in sys.argv
    where = rank.join()
    make, loss = MODELS[model](where)
    ids: dict[str, Any] = {"device_ids": [where]} if where.type != "cpu" else {}

    def maybe_compiled(module: Any) -> Any:
        if not compiles:
            return module
        return torch.compile(module, backend="aot_eager" if rank.gpu_part.IS_REHEARSAL else "inductor")

    wraps: dict[str, Any] = {
        "torch": lambda module: torch.nn.parallel.DistributedDataParallel(module, **ids),
        "ours": lambda module: ddp.DistributedDataParallel(module, **ids),
        "alone": lambda module: module,
    }
    if compiles:
        del wraps["alone"]  # to compile it takes as long as the others
    contenders = {
        name: turns.contender(name, make, loss, lambda module, wrap=wrap: maybe_compiled(wrap(module)))
        for name, wrap in wraps.items()
    }
    count = sum(1 for _ in contenders["ours"].model.parameters())
    ranks = f"{rank.RANKS} rank{'s' * (rank.RANKS > 1)}"
    name = f"{TITLES[model]}{', compiled' * compiles}, {ranks}"
    turns.rounds(list(contenders.values()), lambda: report(name, contenders, count))
    rank.leave()


def report(name: str, by_name: dict[str, turns.Contender], count: int) -> None:
    theirs, ours, alone = by_name["torch"], by_name["ours"], by_name.get("alone")
    exposed = statistics.median(map(truediv, theirs.step_s, alone.step_s)) if alone else 1.0
    rank.gpu_part.found(
        "comparison",
        table="reducer",
        name=name,
        unit="ms",
        theirs=turns.in_ms(theirs.step_s),
        ours=turns.in_ms(ours.step_s),
        alone=turns.in_ms(alone.step_s) if alone else [],
        target=_FASTER if rank.RANKS > 1 and exposed >= _COMMUNICATION_SHOWS else _NO_SLOWER,
    )
    if alone is None or not turns.HAS_CPU_TIMES:
        return
    rank.gpu_part.found(
        "comparison",
        table="cpu",
        name=name,
        unit="ms",
        theirs=turns.in_ms(theirs.cpu_s),
        ours=turns.in_ms(ours.cpu_s),
        alone=turns.in_ms(alone.cpu_s),
        target=_NO_SLOWER,
    )
    each_us = [(one - other) / count * 1e6 for one, other in zip(ours.cpu_s, alone.cpu_s, strict=True)]
    rank.gpu_part.found(
        "figure",
        table="cpu",
        name=f"{name}: CPU time of our reducer for a parameter",
        unit="us",
        values=[round(each, 3) for each in each_us],
        limit=_LIMIT_US,
    )


if __name__ == "__main__":
    main()
