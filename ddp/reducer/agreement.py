"""Check that all ranks wrap the same model in the same way.

The check runs at construction and when the buckets are rebuilt. A difference raises an error that names the
parameter or the option. Without the check, a collective would hang.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sysconfig
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ddp.groups import joining
from ddp.reducer import plan
from ddp.reducer.collectives import broadcast_from_rank_0, gather_rows
from ddp.telemetry.coded import WrongUse, listed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    Options = Sequence[tuple[str, object]]

# --- errors ----------------------------------------------------------------------------------------
#
# Errors for uses of a module that cannot give the same gradients on every rank.
#
# Where torch has the same error, the type and the first words are torch's: programs may match them. Then the message
# names the parameters and the rank, and says what to do.

_LIBRARIES = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
)
_REMOVE_STATIC_GRAPH = "The graph of this model changes between steps: remove static_graph=True."


def unfinished(names: Sequence[str], indices: Sequence[int], rank: int, find_unused: bool) -> RuntimeError:
    cure = (
        "Since `find_unused_parameters=True` is enabled, this likely means that not all `forward` outputs "
        "participate in computing loss. You can fix this by making sure that they all do."
        if find_unused
        else "You can enable unused parameter detection by passing the keyword argument "
        "`find_unused_parameters=True` to `DistributedDataParallel`, and by making sure all `forward` function "
        "outputs participate in calculating loss. Or freeze the parameters with `requires_grad_(False)` before "
        "wrapping."
    )
    return WrongUse(
        "Expected to have finished reduction in the prior iteration before starting a new one. "
        "This error indicates that your module has parameters that were not used in producing loss. "
        f"{cure}\nParameters which did not receive grad for rank {rank}: {listed(names)}"
        f"\nParameter indices which did not receive grad for rank {rank}: {' '.join(map(str, indices))}"
        "\nTo see what each rank does, set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL."
    )


def graph_changed(names: Sequence[str], indices: Sequence[int], rank: int) -> RuntimeError:
    return WrongUse(
        "Expected to have finished reduction in the prior iteration before starting a new one. "
        "This error indicates that your training graph has changed in this iteration, e.g., one parameter is used "
        "in first iteration, but then got unused in the second iteration. this is not compatible with static_graph "
        f"set to True. {_REMOVE_STATIC_GRAPH}"
        f"\nParameter indices which did not receive grad for rank {rank}: {' '.join(map(str, indices))}"
        f"\nParameters which did not receive grad for rank {rank}: {listed(names)}"
    )


def unexpected(name: str, rank: int) -> RuntimeError:
    return WrongUse(
        "Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration, but "
        f"then got used in the second iteration. this is not compatible with static_graph set to True. "
        f"{_REMOVE_STATIC_GRAPH}\nRank {rank} computed an unexpected gradient of parameter {name!r}."
    )


def ready_twice(name: str, index: int, rank: int) -> RuntimeError:
    return WrongUse(
        "Expected to mark a variable ready only once. "
        f"Parameter at index {index} with name {name} has been marked as ready twice on rank {rank}: a "
        "gradient was computed after its bucket had been sent. "
        "This error is caused by one of the following reasons:\n"
        "1) Use of a module parameter outside the `forward` function. Please make sure model parameters are not "
        "shared across multiple concurrent forward-backward passes, or try to use _set_static_graph() as a "
        "workaround if this module graph does not change during training loop.\n"
        "2) Reused parameters in multiple reentrant backward passes, for example several reentrant `checkpoint` "
        "calls over the same layers. Use `checkpoint(..., use_reentrant=False)`, or static_graph=True."
    )


def stays_local(name: str, rank: int) -> RuntimeError:
    return WrongUse(
        f"A backward on rank {rank} computed a gradient of {name} that is not averaged ({_line_of_script()}), so the "
        "replicas may diverge: no forward of the DistributedDataParallel wrapper is waiting for a backward. Only the "
        "first backward after a forward of the wrapper is averaged; one of `.module` or of its methods is not. If "
        "local gradients are meant, run forward and backward inside `no_sync()`. To get an error instead of a warning, "
        "set strict=True."
    )


def _line_of_script() -> str:
    """Return where the backward was called. A thread of the engine for an accelerator does not know it."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith((*_LIBRARIES, "<")):
            return f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return "at an unknown line"


def static_graph_began_locally(rank: int) -> RuntimeError:
    return WrongUse(
        f"With static_graph=True, the first backward must be averaged, but on rank {rank} it ran under `no_sync()`. "
        "Run the first step without `no_sync()`."
    )


def forward_outside_context(rank: int) -> RuntimeError:
    return WrongUse(
        f"A backward on rank {rank} did not store gradients in `.grad`, so they are not averaged. The probable cause "
        "is a distributed backward (RPC) whose forward ran in another context. Call the model and "
        "`dist_autograd.backward` in the same `with dist_autograd.context()` block."
    )


def context_without_gradient(names: Sequence[str], rank: int) -> RuntimeError:
    return WrongUse(
        f"A distributed backward computed gradients of {listed(names)} on another rank, but not on rank {rank}. So the "
        "average cannot be added to this rank's context of torch.distributed.autograd. Use the same parameters on all "
        "ranks."
    )


def delayed_too_late(names: Sequence[str], rank: int) -> RuntimeError:
    return WrongUse(
        f"On rank {rank}, a gradient was computed after the delayed all-reduce had started, so it is not averaged. It "
        f"is one of {listed(names)}. The gradient of `param_to_hook_all_reduce` must be computed last: choose a "
        "parameter that the forward uses before all of `delay_all_reduce_named_params`. Do not call `zero_grad()` "
        "between a forward and its backward."
    )


def never_delayed_to(names: Sequence[str], rank: int) -> RuntimeError:
    return WrongUse(
        f"The gradients of {listed(names)} on rank {rank} are not averaged. Their all-reduce starts when the gradient "
        "of `param_to_hook_all_reduce` is computed, and this backward did not compute it. Choose a parameter that "
        "every forward uses."
    )


def delayed_in_join() -> RuntimeError:
    return WrongUse(
        "join() and `delay_all_reduce_named_params` cannot be used together: a rank without input cannot match the "
        "delayed all-reduce. Remove one of them."
    )


def no_manual_finalization() -> NotImplementedError:
    return NotImplementedError(
        "manual finalization of a backward is not supported: a backward ends with all gradients averaged. Remove "
        "`require_manual_backward_finalization` and `finalize_backward()`, or use "
        "torch.nn.parallel.DistributedDataParallel"
    )


def changed_module(names: Sequence[str], rank: int) -> RuntimeError:
    return WrongUse(
        "The module was changed after it had been wrapped in DistributedDataParallel: on rank "
        f"{rank}, {listed(names)} were added, or requires_grad was set to True. Their gradients are not averaged, so "
        "the replicas may diverge. Change the module before you wrap it. To get an error instead of a warning, set "
        "strict=True."
    )


def different_plans(rank: int) -> RuntimeError:
    return WrongUse(
        f"The ranks have different bucket layouts (detected on rank {rank}), so gradients of different parameters "
        "would be averaged. All ranks must wrap the same model with the same options, and use the same parameters in "
        "the first backward. TORCH_DISTRIBUTED_DEBUG=DETAIL shows what each rank does."
    )


def without_reducer(function: str) -> str:
    return (
        f"{function} cannot be used with torch._dynamo.config.optimize_ddp = 'python_reducer': torch then averages the "
        "gradients itself, without buckets. Set another mode before you wrap the model, for example 'ddp_optimizer'."
    )


def not_capturable(obstacle: str) -> RuntimeError:
    return WrongUse(f"DistributedDataParallel cannot be captured in a graph: {obstacle}.")


# --- agreement -------------------------------------------------------------------------------------

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
