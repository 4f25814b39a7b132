"""Unusual ways through the graph: several passes, checkpoints, second derivatives, static graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from models import Mlp, SometimesUnused, Tied, observe, square, train
from register import case
from torch import nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from trial import Trial

VIEW = {"gradient_as_bucket_view": True}
STATIC = {"static_graph": True}
UNUSED = {"find_unused_parameters": True}


@case(2, 3, plain=({},), view=(VIEW,), static=(STATIC,))
def several_forwards_one_backward(trial: Trial, given: dict[str, Any]) -> None:
    model = trial.wrap(Mlp(), **given)
    for step in range(3):
        model.zero_grad()
        outs = [model(trial.data(4, 8, step=10 * step + i)) for i in range(3)]
        sum(square(out) for out in outs).backward()
        observe(trial, f"step {step}", model)


@case(2, plain=({},), view=(VIEW,), static=(STATIC,), find=(UNUSED,))
def a_forward_without_gradients_between(trial: Trial, given: dict[str, Any]) -> None:
    """As in contrastive learning: the second pass gives targets only."""
    model = trial.wrap(Mlp(), **given)
    for step in range(3):
        model.zero_grad()
        with torch.no_grad():
            target = model(trial.data(4, 8, step=step + 50))
        square(model(trial.data(4, 8, step=step)) - target).backward()
        observe(trial, f"step {step}", model)


@case(2, plain=({},), view=(VIEW,), find=(UNUSED,))
def forward_fed_by_itself(trial: Trial, given: dict[str, Any]) -> None:
    model = trial.wrap(Mlp(), **given)
    for step in range(2):
        model.zero_grad()
        x = trial.data(4, 8, step=step)
        with torch.no_grad():
            x = model(x)
        square(model(x)).backward()
        observe(trial, f"step {step}", model)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, times: int = 1) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.reentrant, self.times = reentrant, times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner[0](x)
        for _ in range(self.times):
            x = checkpoint(self.inner[1], x, use_reentrant=self.reentrant)
        out: torch.Tensor = self.inner[2](x)
        return out


@case(
    2,
    plain=(False, 1, {}),
    view=(False, 1, VIEW),
    find=(False, 1, UNUSED),
    static=(False, 1, STATIC),
    twice=(False, 2, {}),
    reentrant=(True, 1, {}),
    reentrant_view=(True, 1, VIEW),
    reentrant_static=(True, 1, STATIC),
    reentrant_twice_static=(True, 2, STATIC),
    twice_static_view=(False, 2, {**STATIC, **VIEW}),
)
def checkpoints(trial: Trial, reentrant: bool, times: int, given: dict[str, Any]) -> None:
    model = trial.wrap(Checkpointed(reentrant, times), **given)
    train(trial, model, lambda step: trial.data(3, 6, step=step))


@case(2, plain=({},), view=(VIEW,))
def second_derivatives(trial: Trial, given: dict[str, Any]) -> None:
    """A gradient penalty: the gradient with respect to the input goes into the loss."""
    model = trial.wrap(Mlp(depth=2), **given)
    for step in range(3):
        model.zero_grad()
        x = trial.data(4, 8, step=step).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        trial.note("slope", slope)
        (slope.norm(dim=1) - 1).pow(2).mean().backward()
        for name, parameter in model.named_parameters():
            if "bias" not in name:
                trial.note(f"step {step} {name}", parameter.grad)


@case(2, plain=({},), view=(VIEW,))
def backward_keeps_the_graph(trial: Trial, given: dict[str, Any]) -> None:
    model = trial.wrap(Mlp(), **given)
    for step in range(3):
        model.zero_grad()
        out = model(trial.data(4, 8, step=step))
        square(out).backward(retain_graph=True)
        observe(trial, f"step {step}", model)


@case(2, plain=({},), view=(VIEW,), static=(STATIC,), find=(UNUSED,))
def part_of_the_loss_outside(trial: Trial, given: dict[str, Any]) -> None:
    """A term of the loss that goes past the model's forward: straight at a parameter."""
    model = trial.wrap(Mlp(), **given)
    for step in range(3):
        model.zero_grad()
        loss = square(model(trial.data(4, 8, step=step)))
        loss = loss + 0.01 * sum((p * p).sum() for p in model.parameters())
        loss.backward()
        observe(trial, f"step {step}", model)


@case(2, 3, four=(4,), varied=(0,))
def ranks_use_different_layers(trial: Trial, fixed: int) -> None:
    """With find_unused_parameters the rank that did not use a layer gives zero to its mean."""
    model = trial.wrap(SometimesUnused(), **UNUSED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        used = (0, 1 + (trial.rank + (0 if fixed else step)) % 3)
        square(model(trial.data(3, 6, step=step), used=used)).backward()
        observe(trial, f"step {step}", model)
        optimizer.step()


@case(
    2,
    plain=({},),
    view=(VIEW,),
    tiny=({"bucket_cap_mb": 0.0002},),
    skip=({"skip_all_reduce_unused_params": True},),
)
def layers_used_by_turns(trial: Trial, given: dict[str, Any]) -> None:
    model = trial.wrap(SometimesUnused(), **UNUSED, **given)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    turns = [(0, 1), (0, 2), (0, 3)]
    for step in range(4):
        optimizer.zero_grad()
        used = (0, 1) if "skip_all_reduce_unused_params" in given else turns[step % 3]
        square(model(trial.data(3, 6, step=step), used=used)).backward()
        observe(trial, f"step {step}", model)
        optimizer.step()


@case(2, plain=({},), view=(VIEW,))
def unused_under_no_sync(trial: Trial, given: dict[str, Any]) -> None:
    """A parameter used only in a step that was not averaged counts as used when the next one is."""
    model = trial.wrap(SometimesUnused(depth=3), **UNUSED, **given)
    for step in range(2):
        model.zero_grad()
        with model.no_sync():
            square(model(trial.data(3, 6, step=2 * step), used=(0, 1))).backward()
        observe(trial, f"step {step}: alone", model, alike=False)
        square(model(trial.data(3, 6, step=2 * step + 1), used=(0,))).backward()
        observe(trial, f"step {step}: together", model)


@case(2, 3, none=(True,), keep=(False,))
def unused_on_one_rank_under_no_sync(trial: Trial, set_to_none: bool) -> None:
    model = trial.wrap(SometimesUnused(depth=3), **UNUSED)
    for step in range(3):
        model.zero_grad(set_to_none=set_to_none)
        with model.no_sync():
            square(model(trial.data(3, 6, step=2 * step), used=(0, 1 + trial.rank % 2))).backward()
        square(model(trial.data(3, 6, step=2 * step + 1), used=(0,))).backward()
        observe(trial, f"step {step}", model)


@case(2, plain=({},), view=(VIEW,))
def an_output_left_out_of_the_loss(trial: Trial, given: dict[str, Any]) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            return self.a(x), self.b(x)

    model = trial.wrap(Two(), **UNUSED, **given)
    for step in range(3):
        model.zero_grad()
        one, two = model(trial.data(3, 4, step=step))
        square(one).backward() if step != 1 else square(two).backward()
        observe(trial, f"step {step}", model)


@case(2, static=(STATIC,), static_view=({**STATIC, **VIEW},), late=({"late": True},))
def static_graph_with_unused(trial: Trial, given: dict[str, Any]) -> None:
    late = given.get("late", False)
    model = trial.wrap(SometimesUnused(), **({} if late else given))
    if late:
        model._set_static_graph()
    for step in range(4):
        model.zero_grad()
        square(model(trial.data(3, 6, step=step), used=(0, 2, 2))).backward()
        observe(trial, f"step {step}", model)


@case(2, plain=({},), view=(VIEW,))
def static_graph_tied_and_repeated(trial: Trial, given: dict[str, Any]) -> None:
    model = trial.wrap(Tied(), **STATIC, **given)
    for step in range(4):
        model.zero_grad()
        x = torch.arange(6) % 7
        (square(model(x)) + square(model(x.flip(0)))).backward()
        observe(trial, f"step {step}", model)


@case()
def a_function_of_ones_own(trial: Trial) -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return grad * 2

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = Doubled.apply(self.layer(x))
            return out

    train(trial, trial.wrap(Net()), lambda step: trial.data(3, 4, step=step))


@case()
def several_threads_of_backward(trial: Trial) -> None:
    """Backward called in another thread than forward."""
    import threading

    model = trial.wrap(Mlp())
    for step in range(2):
        model.zero_grad()
        loss = square(model(trial.data(4, 8, step=step)))
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        observe(trial, f"step {step}", model)


@case()
def functional_call(trial: Trial) -> None:
    """torch.func: the module's forward with parameters given from outside."""
    model = trial.wrap(Mlp(depth=2))
    given = {name: p.detach() * 2 for name, p in model.named_parameters()}
    with torch.no_grad():
        trial.note("called", torch.func.functional_call(model, given, (trial.data(4, 8),)))
    square(model(trial.data(4, 8))).backward()
    observe(trial, "after", model)


@case(2, 3, plain=({},), find=(UNUSED,), small=({"bucket_cap_mb": 0.0002},))
def the_whole_model_is_checkpointed(trial: Trial, given: dict[str, Any]) -> None:
    """The forward of the wrapper runs again within its own backward."""
    model = trial.wrap(Mlp(), **given)
    for step in range(4):
        model.zero_grad()
        given_x = trial.data(4, 8, step=step).requires_grad_()
        square(checkpoint(model, given_x, use_reentrant=False)).backward()
        observe(trial, f"step {step}", model)


@case(2, 3)
def blocks_wrapped_apart_and_checkpointed(trial: Trial) -> None:
    blocks = [trial.wrap(Mlp(depth=2)) for _ in range(3)]
    for step in range(4):
        x = trial.data(4, 8, step=step)
        for block in blocks:
            block.zero_grad()
            x = checkpoint(block, x, use_reentrant=False)
        square(x).backward()
        for number, block in enumerate(blocks):
            observe(trial, f"step {step} block {number}", block)


@case(2, 3)
def two_wrappers_share_an_encoder(trial: Trial) -> None:
    """Both average its gradients in one backward."""
    encoder = Mlp()
    models = [trial.wrap(nn.Sequential(encoder, nn.Linear(8, 2))) for _ in range(2)]
    for step in range(5):
        for model in models:
            model.zero_grad()
        x = trial.data(4, 8, step=step)
        (square(models[0](x)) + square(models[1](x + 1))).backward()
        for number, model in enumerate(models):
            observe(trial, f"step {step} model {number}", model)


@case(2, 3)
def a_wrapper_in_a_wrapper(trial: Trial) -> None:
    inner = trial.wrap(Mlp())
    model = trial.wrap(nn.Sequential(inner, nn.Linear(8, 2)))
    for step in range(5):
        model.zero_grad()
        square(model(trial.data(4, 8, step=step))).backward()
        observe(trial, f"step {step}", model)
