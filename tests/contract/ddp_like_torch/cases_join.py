"""join(): ranks with fewer batches than others go through the motions until the last one is done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from models import Buffered, Mlp, SometimesUnused, buffers, observe, square
from register import case
from torch.distributed.algorithms.join import Join

if TYPE_CHECKING:
    from trial import Trial

INITIAL = {"divide_by_initial_world_size": True}
ACTIVE = {"divide_by_initial_world_size": False}
VIEW = {"gradient_as_bucket_view": True}


def batches(trial: Trial, lengths: tuple[int, ...]) -> range:
    return range(lengths[trial.rank % len(lengths)])


LENGTHS = {
    "first_ends": (1, 4),
    "last_ends": (4, 2),
    "even": (3, 3),
    "one_has_none": (0, 2),
    "none_at_all": (0, 0),
}


@case(
    2,
    3,
    **{f"{name}_initial": (lengths, INITIAL, {}) for name, lengths in LENGTHS.items()},
    **{f"{name}_active": (lengths, ACTIVE, {}) for name, lengths in LENGTHS.items()},
    view=((1, 4), INITIAL, VIEW),
    view_active=((1, 4), ACTIVE, VIEW),
    tiny=((1, 4), INITIAL, {"bucket_cap_mb": 0.0003}),
    tiny_active=((4, 2), ACTIVE, {"bucket_cap_mb": 0.0003}),
    disabled=((3, 3), {"enable": False}, {}),
)
def uneven(trial: Trial, lengths: tuple[int, ...], how: dict[str, Any], given: dict[str, Any]) -> None:
    model = trial.wrap(Mlp(), **given)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with model.join(**how):
        for step in batches(trial, lengths):
            optimizer.zero_grad()
            loss = square(model(trial.data(4, 8, step=step)))
            loss.backward()
            trial.note(f"step {step}: loss", loss)
            observe(trial, f"step {step}", model, alike=False)
            optimizer.step()
    for name, parameter in model.named_parameters():
        trial.note(f"in the end {name}", parameter, alike=True)


@case(2, 3, initial=(INITIAL,), active=(ACTIVE,))
def with_buffers(trial: Trial, how: dict[str, Any]) -> None:
    """The last one's buffers are everybody's in the end."""
    model = trial.wrap(Buffered())
    with model.join(**how):
        for step in batches(trial, (1, 3)):
            square(model(trial.data(4, 4, step=step))).backward()
    buffers(trial, "in the end", model)


@case(2, initial=(INITIAL,), active=(ACTIVE,))
def with_unused(trial: Trial, how: dict[str, Any]) -> None:
    model = trial.wrap(SometimesUnused(), find_unused_parameters=True)
    with model.join(**how):
        for step in batches(trial, (2, 4)):
            model.zero_grad()
            square(model(trial.data(3, 6, step=step), used=(0, 1))).backward()
            observe(trial, f"step {step}", model, alike=False)


@case(2, initial=(INITIAL,), active=(ACTIVE,))
def with_no_sync(trial: Trial, how: dict[str, Any]) -> None:
    model = trial.wrap(Mlp())
    with model.join(**how):
        for step in batches(trial, (2, 6)):
            if step % 2 == 0:
                with model.no_sync():
                    square(model(trial.data(4, 8, step=step))).backward()
            else:
                square(model(trial.data(4, 8, step=step))).backward()
                observe(trial, f"step {step}", model, alike=False)
                model.zero_grad()


@case(2, 3, first=((1, 4),), last=((4, 2),))
def throwing_on_early_termination(trial: Trial, lengths: tuple[int, ...]) -> None:
    model = trial.wrap(Mlp())
    done = 0
    try:
        with model.join(throw_on_early_termination=True):
            for step in batches(trial, lengths):
                model.zero_grad()
                square(model(trial.data(4, 8, step=step))).backward()
                done += 1
    except RuntimeError as error:
        trial.note("raised", str(error).split(".")[0])
    trial.note("done", done)


@case(2, 3)
def several_models(trial: Trial) -> None:
    """Only the first is told who has input left; what the others do beside their buckets must not count on more."""
    one, two = trial.wrap(Mlp()), trial.wrap(Mlp(depth=2))
    if trial.is_ours:
        from ddp import check_numerics

        check_numerics(two)
    with Join([one, two]):
        for step in batches(trial, (1, 3)):
            one.zero_grad()
            two.zero_grad()
            square(one(trial.data(4, 8, step=step))).backward()
            square(two(trial.data(4, 8, step=step))).backward()
            observe(trial, f"step {step}: one", one, alike=False)
            observe(trial, f"step {step}: two", two, alike=False)


@case(2, 3)
def with_a_sharded_optimizer(trial: Trial) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = trial.wrap(Mlp())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    with Join([model, optimizer]):
        for step in batches(trial, (1, 3)):
            optimizer.zero_grad()
            square(model(trial.data(4, 8, step=step))).backward()
            optimizer.step()
    for name, parameter in model.named_parameters():
        trial.note(f"in the end {name}", parameter, alike=True)


@case()
def an_exception_within(trial: Trial) -> None:
    model = trial.wrap(Mlp())

    def run() -> None:
        with model.join():
            square(model(trial.data(4, 8))).backward()
            raise KeyError("of the loop's own")

    trial.attempt("loop", run)


@case(2)
def two_epochs(trial: Trial) -> None:
    model = trial.wrap(Mlp())
    for epoch in range(2):
        with model.join():
            for step in batches(trial, (1, 3) if epoch == 0 else (3, 1)):
                model.zero_grad()
                square(model(trial.data(4, 8, step=10 * epoch + step))).backward()
                observe(trial, f"epoch {epoch} step {step}", model, alike=False)
        for name, parameter in model.named_parameters():
            trial.note(f"epoch {epoch} {name}", parameter, alike=True)


@case(2)
def with_a_hook(trial: Trial) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    model = trial.wrap(Mlp())
    model.register_comm_hook(None, allreduce_hook)
    with model.join():
        for step in batches(trial, (1, 3)):
            model.zero_grad()
            square(model(trial.data(4, 8, step=step))).backward()
            observe(trial, f"step {step}", model, alike=False)


@case(2)
def with_a_static_graph(trial: Trial) -> None:
    model = trial.wrap(Mlp(), static_graph=True)
    with model.join():
        for step in batches(trial, (2, 2)):
            model.zero_grad()
            square(model(trial.data(4, 8, step=step))).backward()
            observe(trial, f"step {step}", model)
