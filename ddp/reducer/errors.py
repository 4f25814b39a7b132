"""Errors for uses of a module that cannot give the same gradients on every rank.

Where torch has the same error, the type and the first words are torch's: programs may match them. Then the message
names the parameters and the rank, and says what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp.telemetry.name_list import listed

if TYPE_CHECKING:
    from collections.abc import Sequence


def unfinished(names: Sequence[str], indices: Sequence[int], rank: int, *, find_unused: bool) -> RuntimeError:
    cure = (
        "Since `find_unused_parameters=True` is enabled, this likely means that not all `forward` outputs "
        "participate in computing loss. You can fix this by making sure that they all do."
        if find_unused
        else "You can enable unused parameter detection by passing the keyword argument "
        "`find_unused_parameters=True` to `DistributedDataParallel`, and by making sure all `forward` function "
        "outputs participate in calculating loss; or freeze the parameters before wrapping "
        "(`requires_grad_(False)`)."
    )
    return RuntimeError(
        "Expected to have finished reduction in the prior iteration before starting a new one. "
        "This error indicates that your module has parameters that were not used in producing loss. "
        f"{cure}\nParameters which did not receive grad for rank {rank}: {listed(names)}"
        f"\nParameter indices which did not receive grad for rank {rank}: {' '.join(map(str, indices))}"
        "\nTo see what each rank does, set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL."
    )


def graph_changed(names: Sequence[str], indices: Sequence[int], rank: int) -> RuntimeError:
    return RuntimeError(
        "Expected to have finished reduction in the prior iteration before starting a new one. "
        "This error indicates that your training graph has changed in this iteration, e.g., one parameter is used "
        "in first iteration, but then got unused in the second iteration. this is not compatible with static_graph "
        f"set to True.\nParameter indices which did not receive grad for rank {rank}: {' '.join(map(str, indices))}"
        f"\nParameters which did not receive grad for rank {rank}: {listed(names)}. "
        "Leave static_graph out for a model whose graph changes."
    )


def unexpected(name: str, rank: int) -> RuntimeError:
    return RuntimeError(
        "Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration, but "
        "then got used in the second iteration. this is not compatible with static_graph set to True.\n"
        f"Parameter {name!r} got a gradient on rank {rank} that was not expected. "
        "Leave static_graph out for a model whose graph changes."
    )


def ready_twice(names: Sequence[str], index: int, rank: int) -> RuntimeError:
    return RuntimeError(
        "Expected to mark a variable ready only once. This error is caused by one of the following reasons: "
        "1) Use of a module parameter outside the `forward` function. Please make sure model parameters are not "
        "shared across multiple concurrent forward-backward passes, or try to use _set_static_graph() as a "
        "workaround if this module graph does not change during training loop. 2) Reused parameters in multiple "
        "reentrant backward passes, e.g. several reentrant `checkpoint` calls over the same layers: use "
        "`checkpoint(..., use_reentrant=False)`, or static_graph=True.\n"
        f"Parameter at index {index} with name {listed(names)} has been marked as ready twice on rank {rank}: a "
        "gradient arrived after its bucket had been sent."
    )


def outside(names: Sequence[str], rank: int) -> RuntimeError:
    return RuntimeError(
        f"A backward on rank {rank} gave gradients to {listed(names)}, but did not come from a forward of the "
        "DistributedDataParallel module that holds them: these gradients are not averaged, and the replicas would "
        "drift apart. Call the wrapped model itself, not its `.module` or a method of it; or, if gradients of this "
        "rank alone are meant, run forward and backward inside `no_sync()`."
    )


def spoilt(names: Sequence[str], rank: int) -> RuntimeError:
    return RuntimeError(
        f"A backward raised on rank {rank}, and what it left in the gradients of {listed(names)} is still there: parts "
        "of it are averaged already, so that nothing can be added to it. Call `zero_grad()` after a backward that "
        "raised, before the next one."
    )


def forward_outside_context(rank: int) -> RuntimeError:
    return RuntimeError(
        f"A backward on rank {rank} left no gradient in `.grad`: probably it was a distributed backward (RPC), and the "
        "forward did not run in the same context. Its gradients are not averaged. Call the model and "
        "`dist_autograd.backward` in the same `with dist_autograd.context()` block."
    )


def context_without_gradient(names: Sequence[str], rank: int) -> RuntimeError:
    return RuntimeError(
        f"A distributed backward gave no gradient to {listed(names)} on rank {rank}, but it did on another rank. The "
        "average cannot be added to this rank's context of torch.distributed.autograd. Use the same parameters on all "
        "ranks."
    )


def delayed_too_late(names: Sequence[str], rank: int) -> RuntimeError:
    return RuntimeError(
        f"A delayed gradient on rank {rank} was not there when the delayed all-reduce began, and is not averaged: one "
        f"of {listed(names)}. The gradient of `param_to_hook_all_reduce` must be the last: choose a parameter that the "
        "forward uses before all of `delay_all_reduce_named_params`. And do not call `zero_grad()` between a forward "
        "and its backward."
    )


def never_delayed_to(names: Sequence[str], rank: int) -> RuntimeError:
    return RuntimeError(
        f"The gradients of {listed(names)} on rank {rank} are not averaged: `param_to_hook_all_reduce`, which their "
        "all-reduce was delayed to, got no gradient in this backward. Choose a parameter that every forward uses."
    )


def delayed_in_join() -> RuntimeError:
    return RuntimeError(
        "join() and `delay_all_reduce_named_params` exclude each other: a rank without input does not know when to "
        "take part in the all-reduce that was delayed. Leave out one of them."
    )


def changed_module(names: Sequence[str], rank: int, what: str) -> RuntimeError:
    return RuntimeError(
        f"The module was changed after it had been wrapped in DistributedDataParallel: on rank {rank}, "
        f"{listed(names)} {what}, and would not be averaged. Change the module first, then wrap it (again)."
    )


def different_plans(rank: int) -> RuntimeError:
    return RuntimeError(
        f"The ranks do not agree on their buckets of gradients (seen on rank {rank}): they would average different "
        "gradients with each other. All ranks must wrap the same model with the same options, and use the same "
        "parameters in the first backward; see TORCH_DISTRIBUTED_DEBUG=DETAIL for what each of them does."
    )
