"""Communication hooks: torch's own, unmodified, and what a hook is given, may give back, and may not do.

Annotations are real classes here, not their names: that is what registering a hook looks at.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from models import Mlp, SometimesUnused, Tied, observe, square, train
from register import case
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    optimizer_overlap_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)

if TYPE_CHECKING:
    from trial import Trial

VIEW = {"gradient_as_bucket_view": True}
TINY = {"bucket_cap_mb": 0.0003}


def power(**given: Any) -> Callable[[], Any]:
    def make() -> Any:
        return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, **given)

    return make


def local_sgd() -> Any:
    everybody = dist.group.WORLD
    alone = [dist.new_group([each]) for each in range(dist.get_world_size())][dist.get_rank()]
    return post_localSGD_hook.PostLocalSGDState(everybody, alone, start_localSGD_iter=2)


def group() -> Any:
    return dist.group.WORLD


def nothing() -> Any:
    return None


TORCHS: dict[str, tuple[Callable[[], Any], Any]] = {
    "allreduce": (nothing, default_hooks.allreduce_hook),
    "allreduce_on_group": (group, default_hooks.allreduce_hook),
    "fp16": (nothing, default_hooks.fp16_compress_hook),
    "fp16_wrapped": (nothing, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "power": (power(start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook),
    "power_cold": (
        power(start_powerSGD_iter=2, warm_start=False, use_error_feedback=False),
        powerSGD_hook.powerSGD_hook,
    ),
    "post_local": (local_sgd, post_localSGD_hook.post_localSGD_hook),
    "noop": (nothing, debugging_hooks.noop_hook),
}


@case(
    2,
    3,
    **{name: (name, {}) for name in TORCHS},
    **{f"{name}_view": (name, VIEW) for name in ("allreduce", "fp16", "power")},
    **{f"{name}_tiny": (name, TINY) for name in ("allreduce", "fp16")},
)
def torchs_own(trial: "Trial", name: str, given: dict[str, Any]) -> None:
    make, hook = TORCHS[name]
    torch.manual_seed(0)
    model = trial.wrap(Mlp(width=12), **given)
    model.register_comm_hook(make(), hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alike = name not in ("noop", "post_local")
    for step in range(4):
        optimizer.zero_grad()
        square(model(trial.data(4, 12, step=step))).backward()
        observe(trial, f"step {step}", model, alike=alike)
        optimizer.step()


@case(2, allreduce=("ALLREDUCE", {}), fp16=("FP16_COMPRESS", {}), allreduce_view=("ALLREDUCE", VIEW))
def built_in(trial: "Trial", name: str, given: dict[str, Any]) -> None:
    model = trial.wrap(Mlp(), **given)
    model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, name))
    train(trial, model, lambda step: trial.data(4, 8, step=step))


@case(2, sgd=(torch.optim.SGD, {"lr": 0.1}), adam=(torch.optim.Adam, {"lr": 0.01}))
def optimizer_in_backward(trial: "Trial", kind: Any, given: dict[str, Any]) -> None:
    model = trial.wrap(Mlp())
    model._register_fused_optim(kind, **given)
    for step in range(3):
        square(model(trial.data(4, 8, step=step))).backward()
        for name, parameter in model.named_parameters():
            trial.note(f"step {step} {name}", parameter, alike=True)
        model.zero_grad()


@case()
def optimizer_in_backward_for_some(trial: "Trial") -> None:
    model = trial.wrap(Mlp())
    some = list(model.module.layers[0].parameters())
    model._register_fused_optim(torch.optim.SGD, 0.1, optim_params=some)
    for step in range(3):
        square(model(trial.data(4, 8, step=step))).backward()
        for name, parameter in model.named_parameters():
            trial.note(f"step {step} {name}", parameter, alike=True)
        model.zero_grad()


@case()
def optimizer_overlapped_by_hook(trial: "Trial") -> None:
    from torch.distributed.optim.utils import functional_optim_map

    model = trial.wrap(Mlp())
    functional = functional_optim_map[torch.optim.SGD](list(model.parameters()), lr=0.1)
    state = optimizer_overlap_hooks._OptimizerHookState(functional)
    hook = optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, state)
    model.register_comm_hook(None, hook)
    for step in range(3):
        square(model(trial.data(4, 8, step=step))).backward()
        for name, parameter in model.named_parameters():
            trial.note(f"step {step} {name}", parameter, alike=True)
        model.zero_grad()


def summed(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def completed(value: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


@case(2, plain=({},), view=(VIEW,), tiny=(TINY,), static=({"static_graph": True},))
def the_sum_is_not_divided(trial: "Trial", given: dict[str, Any]) -> None:
    """A hook has the gradients as they are: dividing is its own affair."""
    model = trial.wrap(Mlp(), **given)
    model.register_comm_hook(None, summed)
    train(trial, model, lambda step: trial.data(4, 8, step=step))


@case(2, plain=({},), view=(VIEW,))
def a_result_in_another_tensor(trial: "Trial", given: dict[str, Any]) -> None:
    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return completed(torch.full_like(bucket.buffer(), 7.0))

    model = trial.wrap(Mlp(), **given)
    model.register_comm_hook(None, hook)
    for step in range(3):
        model.zero_grad()
        square(model(trial.data(4, 8, step=step))).backward()
        observe(trial, f"step {step}", model, alike=False)


@case(2, plain=({},), tiny=(TINY,), find=({"find_unused_parameters": True},))
def what_a_hook_is_given(trial: "Trial", given: dict[str, Any]) -> None:
    """All of a model's gradients, each once; one bucket is the last; the buffer holds what the gradients show."""
    module = Mlp()
    names = {p: name for name, p in module.named_parameters()}
    seen: list[tuple[int, bool, list[str], bool, bool]] = []

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        parts = torch.cat([each.reshape(-1) for each in bucket.gradients()])
        fits = sorted(parts.tolist()) == sorted(bucket.buffer()[: parts.numel()].tolist())
        shaped = [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
        seen.append((bucket.index(), bucket.is_last(), [names[p] for p in bucket.parameters()], fits, shaped))
        state["calls"] += 1
        return summed(None, bucket)

    model = trial.wrap(module, **given)
    state = {"calls": 0}
    model.register_comm_hook(state, hook)
    for step in range(3):
        seen.clear()
        model.zero_grad()
        square(model(trial.data(4, 8, step=step))).backward()
        trial.note("in order", [index for index, *_ in seen] == list(range(len(seen))), alike=True)
        trial.note("last", [last for _, last, *_ in seen].count(True) == 1 and seen[-1][1], alike=True)
        trial.note("all parameters", sorted(name for each in seen for name in each[2]), alike=True)
        trial.note("fits", all(each[3] and each[4] for each in seen))
    trial.note("state", state["calls"] > 0)


@case()
def a_buffer_set_by_the_hook(trial: "Trial") -> None:
    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        bucket.set_buffer(torch.full_like(bucket.buffer(), 3.0))
        return completed(bucket.buffer())

    model = trial.wrap(Mlp())
    model.register_comm_hook(None, hook)
    square(model(trial.data(4, 8))).backward()
    observe(trial, "after", model)


def wrong_annotation(state: Any, bucket: int) -> torch.futures.Future[torch.Tensor]:
    return completed(None)


def wrong_result(state: Any, bucket: dist.GradBucket) -> int:
    return 1


def bare(state, bucket):  # type: ignore[no-untyped-def]
    return completed(bucket.buffer())


def annotated_in_words(state: Any, bucket: "dist.GradBucket") -> torch.futures.Future[torch.Tensor]:
    return completed(bucket.buffer())


@case(
    not_callable=(3,),
    wrong_annotation=(wrong_annotation,),
    wrong_result=(wrong_result,),
    bare=(bare,),
    right=(summed,),
    annotated_in_words=(annotated_in_words,),
)
def registering(trial: "Trial", hook: Any) -> None:
    model = trial.wrap(Mlp())
    trial.attempt("registering", lambda: model.register_comm_hook(None, hook))


@case(python=("python",), built_in=("built_in",), fused=("fused",))
def registered_twice(trial: "Trial", how: str) -> None:
    model = trial.wrap(Mlp())
    model.register_comm_hook(None, summed)
    trial.attempt(
        "again",
        {
            "python": lambda: model.register_comm_hook(None, summed),
            "built_in": lambda: model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
            "fused": lambda: model._register_fused_optim(torch.optim.SGD, lr=0.1),
        }[how],
    )


def no_future(state, bucket):  # type: ignore[no-untyped-def]
    return 5


def raises(state, bucket):  # type: ignore[no-untyped-def]
    raise KeyError("of the hook's own")


def a_future_with_an_error(state, bucket):  # type: ignore[no-untyped-def]
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_exception(ValueError("in the future"))
    return future


@case(no_future=(no_future,), raises=(raises,), late=(a_future_with_an_error,))
def hooks_that_fail(trial: "Trial", hook: Any) -> None:
    model = trial.wrap(Mlp())
    model.register_comm_hook(None, hook)
    out = square(model(trial.data(4, 8)))
    try:
        out.backward()
    except Exception as error:
        trial.note("backward", "raised" if hook is not no_future else trial.caught_as(error))
        trial.remark("backward", str(error))
    else:
        trial.note("backward", "went well")


@case()
def hooks_after_the_first_step(trial: "Trial") -> None:
    model = trial.wrap(Mlp())
    square(model(trial.data(4, 8))).backward()
    observe(trial, "before", model)
    model.zero_grad()
    trial.attempt("registering", lambda: model.register_comm_hook(None, summed))
    square(model(trial.data(4, 8, step=1))).backward()
    observe(trial, "after", model)


@case()
def hooks_under_no_sync(trial: "Trial") -> None:
    calls = []

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        calls.append(bucket.index())
        return summed(None, bucket)

    model = trial.wrap(Mlp())
    model.register_comm_hook(None, hook)
    for step in range(4):
        if step % 2 == 0:
            with model.no_sync():
                square(model(trial.data(4, 8, step=step))).backward()
        else:
            square(model(trial.data(4, 8, step=step))).backward()
        trial.note("called", len(calls) > step // 2)
        observe(trial, f"step {step}", model, alike=step % 2 == 1)
        if step % 2:
            model.zero_grad()


@case()
def hooks_with_unused(trial: "Trial") -> None:
    model = trial.wrap(SometimesUnused(), find_unused_parameters=True)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    for step in range(3):
        model.zero_grad()
        square(model(trial.data(3, 6, step=step), used=(0, 1 + (step + trial.rank) % 3))).backward()
        observe(trial, f"step {step}", model)


@case()
def hooks_with_tied(trial: "Trial") -> None:
    model = trial.wrap(Tied())
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    train(trial, model, lambda step: (torch.arange(6) + trial.rank + step) % 7)


@case(2, 4)
def averaged_now_and_then(trial: "Trial") -> None:
    """Post-local SGD with torch's averager and optimizer around it."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = trial.wrap(Mlp())
    model.register_comm_hook(local_sgd(), post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=2)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
    for step in range(5):
        optimizer.zero_grad()
        square(model(trial.data(4, 8, step=step))).backward()
        optimizer.step()
        observe(trial, f"step {step}", model, alike=False)
