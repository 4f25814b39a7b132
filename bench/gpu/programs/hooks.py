"""A rank of the part `hooks`: a GPT under torch's DDP with torch's communication hooks, and under ours with ours."""

from __future__ import annotations

from typing import Any

import rank
import torch
import turns
from gpu_models import TITLES, gpt
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import ddp
from ddp import comm_hooks

_RANK = 2  # of the matrices of PowerSGD
_START = 2  # the step from which it compresses: within the warm-up


def torchs_power() -> Any:
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=_RANK, start_powerSGD_iter=_START)


def our_power() -> Any:
    return comm_hooks.PowerSGD(None, rank=_RANK, start_step=_START)


# torch refuses its bf16 hook where there is no GPU.
_BF16 = (default_hooks.bf16_compress_hook, comm_hooks.bf16)
_HALF = (default_hooks.fp16_compress_hook, comm_hooks.fp16) if rank.gpu_part.IS_REHEARSAL else _BF16
# Of torch's, and of ours: what makes the state, and the hook.
PAIRS: dict[str, tuple[Any, Any] | None] = {
    "no hook": None,
    "bf16": ((lambda: None, _HALF[0]), (lambda: None, _HALF[1])),
    "PowerSGD": ((torchs_power, powerSGD_hook.powerSGD_hook), (our_power, comm_hooks.power_sgd)),
}


def main() -> None:
    where = rank.join()
    make, loss = gpt(where)
    ids: dict[str, Any] = {"device_ids": [where]} if where.type != "cpu" else {}
    wrappers = (torch.nn.parallel.DistributedDataParallel, ddp.DistributedDataParallel)
    contenders = []
    for name, pair in PAIRS.items():
        for at, wrapper in enumerate(wrappers):

            def wrap(module: Any, wrapper: Any = wrapper, hooked: Any = pair and pair[at]) -> Any:
                wrapped = wrapper(module, **ids)
                if hooked:
                    make_state, hook = hooked
                    wrapped.register_comm_hook(make_state(), hook)
                return wrapped

            contenders.append(turns.contender(name, make, loss, wrap))
    turns.rounds(contenders, lambda: report(contenders))
    rank.leave()


def report(contenders: list[turns.Contender]) -> None:
    for theirs, ours in zip(contenders[::2], contenders[1::2], strict=True):
        rank.gpu_part.found(
            "comparison",
            table="hooks",
            name=f"{TITLES['gpt']}, {theirs.name}, {rank.RANKS} rank{'s' * (rank.RANKS > 1)}",
            unit="ms",
            theirs=turns.in_ms(theirs.step_s),
            ours=turns.in_ms(ours.step_s),
            target=1.0,
        )


if __name__ == "__main__":
    main()
