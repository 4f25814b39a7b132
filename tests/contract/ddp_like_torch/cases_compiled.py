"""torch.compile around, inside and across the wrapped model, in all modes of `torch._dynamo.config.optimize_ddp`."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from models import Mlp, square
from register import case

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trial import Trial

# torch accepts no buckets below 1 MiB here: 4 layers of 0.5 MiB are 3 buckets.
WIDTH = 362
SMALL = {"bucket_cap_mb": 1}
VIEW = {"gradient_as_bucket_view": True}
STATIC = {"static_graph": True}
UNUSED = {"find_unused_parameters": True}


@contextmanager
def optimize_ddp(mode: str | bool) -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(optimize_ddp=mode):
        yield
    torch._dynamo.reset()


def observe(trial: Trial, when: str, model: Any, alike: bool = True) -> None:
    """A number that depends on every bit: whole gradients would take longer to compare than to compute."""
    for name, parameter in model.named_parameters():
        bits = parameter.grad.reshape(-1).view(torch.int32).to(torch.int64)
        places = torch.arange(1, bits.numel() + 1)
        trial.note(f"{when} {name}.grad", int((bits * places).sum()), alike=alike)


def steps(trial: Trial, model: Any, call: Any = None, number: int = 3) -> None:
    for step in range(number):
        model.zero_grad()
        x = trial.data(4, WIDTH, step=step)
        square(model(x) if call is None else call(x)).backward()
        observe(trial, f"step {step}", model)


class Counting:
    """A backend of torch.compile that counts the graphs it gets."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, _inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


@case(split=("ddp_optimizer", SMALL), whole=(False, SMALL), find=("ddp_optimizer", UNUSED))
@case(
    views=("ddp_optimizer", VIEW),
    static=("ddp_optimizer", STATIC),
    other=("python_reducer_without_compiled_forward", SMALL),
    nightly=True,
)
def compiled_around(trial: Trial, mode: str | bool, given: dict[str, Any]) -> None:
    """torch splits the graph at the buckets of the module that is active."""
    with optimize_ddp(mode):
        count = Counting()
        wrapped = trial.wrap(Mlp(width=WIDTH, depth=4), **given)
        steps(trial, wrapped, torch.compile(wrapped, backend=count))
        trial.note("graphs", count.graphs)


@case(says={"steps": ["compile the module before you wrap it", "python_reducer"]})
def compiled_without_breaks(trial: Trial) -> None:
    """Both refuse; ours says why, and what to do."""
    with optimize_ddp(True):
        wrapped = trial.wrap(Mlp(width=WIDTH, depth=2))
        model = torch.compile(wrapped, backend="eager", fullgraph=True)
        trial.attempt("steps", lambda: steps(trial, wrapped, model, 2))


@case()
def compiled_without_breaks_inside(trial: Trial) -> None:
    with optimize_ddp(True):
        module = Mlp(width=WIDTH, depth=4)
        count = Counting()
        module.compile(backend=count, fullgraph=True)
        steps(trial, trial.wrap(module, **SMALL))
        trial.note("graphs", count.graphs)


@case()
def a_compiled_step(trial: Trial) -> None:
    """Forward and loss in one compiled function, backward outside."""
    with optimize_ddp(True):
        count = Counting()
        model = trial.wrap(Mlp(width=WIDTH, depth=4), **SMALL)

        @torch.compile(backend=count)
        def loss_of(x: torch.Tensor) -> torch.Tensor:
            return square(model(x * 2)) + 1

        for step in range(3):
            model.zero_grad()
            loss_of(trial.data(4, WIDTH, step=step)).backward()
            observe(trial, f"step {step}", model)
        trial.note("graphs", count.graphs)


@case()
def compiled_under_no_sync(trial: Trial) -> None:
    with optimize_ddp(True):
        wrapped = trial.wrap(Mlp(width=WIDTH, depth=2))
        model = torch.compile(wrapped, backend="eager")
        for step in range(2):
            model.zero_grad()
            with wrapped.no_sync():
                square(model(trial.data(4, WIDTH, step=2 * step))).backward()
            observe(trial, f"step {step}: alone", wrapped, alike=False)
            square(model(trial.data(4, WIDTH, step=2 * step + 1))).backward()
            observe(trial, f"step {step}: together", wrapped)


@case(compiled=(True, False), whole=(False, True))
@case(apart=(False, False), compiled_whole=(True, True), nightly=True)
def reduced_in_python(trial: Trial, compiled_backward: bool, fullgraph: bool) -> None:
    """torch averages in hooks, one for each parameter, and compiles them along with the backward."""
    settings = {"optimize_ddp": "python_reducer", "compiled_autograd": compiled_backward}
    torch._dynamo.reset()
    with torch._dynamo.config.patch(settings):
        wrapped = trial.wrap(Mlp(width=WIDTH, depth=2))
        model = torch.compile(wrapped, backend="aot_eager", fullgraph=fullgraph)
        steps(trial, wrapped, model, 2)
        with wrapped.no_sync():
            wrapped.zero_grad()
            square(model(trial.data(4, WIDTH, step=5))).backward()
        observe(trial, "alone", wrapped, alike=False)
    torch._dynamo.reset()


@case(buckets=("ddp_optimizer",))
@case(none=(False,), nightly=True)
def compiled_autograd(trial: Trial, mode: str | bool) -> None:
    with optimize_ddp(mode), torch._dynamo.config.patch(compiled_autograd=True):
        wrapped = trial.wrap(Mlp(width=WIDTH, depth=2))
        steps(trial, wrapped, torch.compile(wrapped, backend="aot_eager"))


@case(nightly=True)
def compiled_by_inductor(trial: Trial) -> None:
    with optimize_ddp(True):
        wrapped = trial.wrap(Mlp(width=WIDTH, depth=4), **SMALL)
        steps(trial, wrapped, torch.compile(wrapped))
