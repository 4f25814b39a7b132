"""Errors for uses of a module that cannot give the same gradients on every rank.

Where torch has the same error, the type and the first words are torch's: programs may match them. Then the message
names the parameters and the rank, and says what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp.telemetry.coded import WrongUse
from ddp.telemetry.name_list import listed

if TYPE_CHECKING:
    from collections.abc import Sequence


_REMOVE_STATIC_GRAPH = "The graph of this model changes between steps: remove static_graph=True."


def unfinished(names: Sequence[str], indices: Sequence[int], rank: int, *, find_unused: bool) -> RuntimeError:
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


def ready_twice(names: Sequence[str], index: int, rank: int) -> RuntimeError:
    return WrongUse(
        "Expected to mark a variable ready only once. "
        f"Parameter at index {index} with name {listed(names)} has been marked as ready twice on rank {rank}: a "
        "gradient was computed after its bucket had been sent. "
        "This error is caused by one of the following reasons:\n"
        "1) Use of a module parameter outside the `forward` function. Please make sure model parameters are not "
        "shared across multiple concurrent forward-backward passes, or try to use _set_static_graph() as a "
        "workaround if this module graph does not change during training loop.\n"
        "2) Reused parameters in multiple reentrant backward passes, for example several reentrant `checkpoint` "
        "calls over the same layers. Use `checkpoint(..., use_reentrant=False)`, or static_graph=True."
    )


def outside(names: Sequence[str], rank: int) -> RuntimeError:
    return WrongUse(
        f"A backward on rank {rank} computed gradients of {listed(names)}, but the forward did not run through the "
        "DistributedDataParallel wrapper. These gradients are not averaged, so the replicas would diverge. Call the "
        "wrapped model itself, not its `.module` or one of its methods. If you want local gradients, run forward and "
        "backward inside `no_sync()`."
    )


def partly_averaged(names: Sequence[str], rank: int) -> RuntimeError:
    return WrongUse(
        f"An earlier backward failed on rank {rank}, and the gradients of {listed(names)} are partly averaged. The "
        "next backward cannot add to them. Call `zero_grad()` after a backward that raised."
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


def changed_module(names: Sequence[str], rank: int, what: str) -> RuntimeError:
    return WrongUse(
        f"The module was changed after it had been wrapped in DistributedDataParallel. On rank {rank}, "
        f"{what}: {listed(names)}. Their gradients are not averaged. Change the module before you wrap it."
    )


def announced_in_vain(rank: int) -> RuntimeError:
    return WrongUse(
        f"A pipeline has run a backward of this stage on rank {rank} without the hooks of autograd. So its gradients "
        "are not averaged, and the replicas diverge. Schedules that compute the gradients of weights apart (zero "
        "bubble) do this. Use ScheduleGPipe, Schedule1F1B or ScheduleInterleaved1F1B."
    )


def not_replanned(names: Sequence[str], rank: int, obstacle: str) -> RuntimeError:
    return WrongUse(
        f"The module was changed after it had been wrapped in DistributedDataParallel. On rank {rank}, requires_grad "
        f"was set to True: {listed(names)}. Their gradients cannot be averaged with {obstacle}. Unfreeze them before "
        "you wrap the module."
    )


def unfrozen_elsewhere(mine: Sequence[str], rank: int, theirs: Sequence[str], other: int) -> RuntimeError:
    return WrongUse(
        f"The ranks train different parameters: rank {rank} has unfrozen {listed(mine)}, but rank {other} has unfrozen "
        f"{listed(theirs)}. Unfreeze the same parameters on all ranks, before the same forward."
    )


def unfrozen_alone(names: Sequence[str], rank: int, absent: Sequence[int], waited_s: float) -> RuntimeError:
    return WrongUse(
        f"Rank {rank} has unfrozen {listed(names)} after wrapping, but "
        f"{'rank' if len(absent) == 1 else 'ranks'} {', '.join(map(str, absent))} did not do so within {waited_s:g} s. "
        "Unfreeze the same parameters on all ranks, before the same forward."
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
