"""Where torch gives wrong gradients without a word, or refuses what is right: there we promise more.

Each case notes one outcome: `right` (what training alone on everybody's data gives), `silently wrong`, or what was
raised, and where. What is right is worked out by each rank alone, from everybody's data, so that a rank that raised
keeps nobody waiting.
"""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from models import Mlp, SometimesUnused, square
from register import better, same
from torch import nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from trial import Trial

SILENT, RIGHT = "silently wrong", "right"


class Course:
    """How far a case has come, and what it comes to."""

    def __init__(self, trial: Trial, module: nn.Module) -> None:
        self.trial = trial
        self.start = copy.deepcopy(module)
        self.point = "construction"

    def average(self, work: Callable[[nn.Module, int], Any]) -> dict[str, torch.Tensor]:
        """Everybody's gradients, each computed here, and their mean."""
        total: dict[str, torch.Tensor] = {}
        for rank in range(self.trial.world_size):
            twin = copy.deepcopy(self.start)
            work(twin, rank)
            for name, parameter in twin.named_parameters():
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
                total[name] = total.get(name, torch.zeros_like(grad)) + grad.detach() / self.trial.world_size
        return total

    def ends(self, module: nn.Module, work: Callable[[nn.Module, int], Any]) -> None:
        # As they are when the backward is over: what comes a moment later comes too late.
        found = {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}
        expected = self.average(work)
        right = all(near(found[n], expected[n]) for n, p in module.named_parameters() if p.requires_grad)
        self.trial.note("outcome", RIGHT if right else SILENT)

    def __enter__(self) -> Course:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> bool:
        if isinstance(error, Exception):
            self.trial.note("outcome", f"raised {self.trial.caught_as(error)} in {self.point}")
            self.trial.remark("outcome", str(error))
        return True


def near(grad: torch.Tensor | None, expected: torch.Tensor) -> bool:
    found = torch.zeros_like(expected) if grad is None else grad.detach().to_dense()
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-6)


def same_start(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def in_backward(
    trial: Trial, make: Callable[[], nn.Module], work: Callable[[Any, int], None], **options: Any
) -> None:
    """The whole case is one call of `work`, whose forwards do not fail."""
    module = same_start(make)
    with Course(trial, module) as course:
        model = trial.wrap(module, **options)
        course.point = "backward"
        work(model, trial.rank)
        course.ends(module, work)


@same("raised RuntimeError in the second step")
def an_output_left_out_in_every_step(trial: Trial) -> None:
    module = same_start(Two)
    with Course(trial, module) as course:
        model = trial.wrap(module)
        for step in ("first", "second", "third"):
            course.point = f"the {step} step"
            model.zero_grad()
            square(model(trial.data(3, 4))[0]).backward()
        course.ends(module, lambda m, rank: square(m(trial.data(3, 4, rank=rank))[0]).backward())


@same(SILENT)
def the_step_in_which_a_parameter_is_first_unused(trial: Trial) -> None:
    """Without find_unused_parameters: the error comes with the next forward, this step's gradients are whole."""
    module = same_start(SometimesUnused)
    with Course(trial, module) as course:
        model = trial.wrap(module)
        course.point = "backward"
        square(model(trial.data(3, 6), used=(0, 2))).backward()
        course.ends(module, lambda m, rank: square(m(trial.data(3, 6, rank=rank), used=(0, 2))).backward())


@same("raised RuntimeError in backward")
def a_static_graph_that_begins_under_no_sync(trial: Trial) -> None:
    module = same_start(Mlp)

    def work(m: Any, rank: int) -> None:
        for step in range(2):
            square(m(trial.data(4, 8, step=step, rank=rank))).backward()

    with Course(trial, module) as course:
        model = trial.wrap(module, static_graph=True)
        course.point = "backward"
        with model.no_sync():
            square(model(trial.data(4, 8))).backward()
        square(model(trial.data(4, 8, step=1))).backward()
        course.ends(module, work)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.a(x), self.b(x)


@same(("raised RuntimeError in backward", SILENT))
def a_static_graph_with_an_output_left_out(trial: Trial) -> None:
    module = same_start(Two)
    with Course(trial, module) as course:
        model = trial.wrap(module, static_graph=True)
        course.point = "backward"
        for step in range(3):
            model.zero_grad()
            square(model(trial.data(3, 4, step=step))[0]).backward()
        course.ends(module, lambda m, rank: square(m(trial.data(3, 4, step=2, rank=rank))[0]).backward())


@same(SILENT)
def two_backwards_of_one_forward(trial: Trial) -> None:
    def work(m: Any, rank: int) -> None:
        out = m(trial.data(4, 8, rank=rank))
        square(out).backward(retain_graph=True)
        out.sum().backward()

    in_backward(trial, Mlp, work)


@same(SILENT)
def two_forwards_then_their_backwards(trial: Trial) -> None:
    def work(m: Any, rank: int) -> None:
        losses = [square(m(trial.data(4, 8, step=step, rank=rank))) for step in range(2)]
        for loss in losses:
            loss.backward()

    in_backward(trial, Mlp, work)


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch.tanh(checkpoint(self.inner, x, use_reentrant=True))
        out: torch.Tensor = self.last(x)
        return out


@same((SILENT, "raised RuntimeError in backward"))
def a_layer_checkpointed_twice_and_reentrant(trial: Trial) -> None:
    def work(m: Any, rank: int) -> None:
        square(m(trial.data(3, 6, rank=rank).requires_grad_())).backward()

    in_backward(trial, Repeated, work)


@same("raised RuntimeError in backward")
def checkpointed_twice_with_find_unused(trial: Trial) -> None:
    def work(m: Any, rank: int) -> None:
        square(m(trial.data(3, 6, rank=rank).requires_grad_())).backward()

    in_backward(trial, Repeated, work, find_unused_parameters=True)


class SparseUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.words = nn.Embedding(5, 4, sparse=True)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out + self.words(torch.tensor([1, 2, 2])) if use else out


@better(torch="raised RuntimeError in backward", ours=RIGHT)
def an_unused_sparse_embedding(trial: Trial) -> None:
    module = same_start(SparseUnused)
    with Course(trial, module) as course:
        model = trial.wrap(module, find_unused_parameters=True)
        course.point = "backward"
        for use in (True, False):
            model.zero_grad()
            square(model(trial.data(3, 4), use)).backward()
        course.ends(module, lambda m, rank: square(m(trial.data(3, 4, rank=rank), False)).backward())


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Embedding(5, 4, sparse=True) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.one(x) + self.two(x)
        return out


@better(torch=(), ours=RIGHT)
def a_sparse_embedding_and_a_rank_without_input(trial: Trial) -> None:
    """torch's class raises on that rank."""
    module = same_start(SparseUnused)
    with Course(trial, module) as course:
        model = trial.wrap(module)
        course.point = "joining"
        with model.join():
            if trial.rank == 0:
                square(model(trial.data(3, 4), True)).backward()
        if trial.rank == 0:
            course.ends(
                module, lambda m, rank: None if rank else square(m(trial.data(3, 4), True)).backward()
            )
        else:
            trial.note("outcome", RIGHT)


@better(torch=SILENT, ours=RIGHT)
def two_sparse_gradients_with_common_values(trial: Trial) -> None:
    """Autograd gives both the same values tensor; divided in place, each would be divided twice."""

    def work(m: Any, rank: int) -> None:
        square(m((torch.arange(4) * (rank + 1)) % 5)).backward()

    in_backward(trial, Shared, work)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise ValueError("out of luck")


class Moody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, fails: bool = False) -> torch.Tensor:
        x = self.first(x)
        out: torch.Tensor = self.second(Failing.apply(x) if fails else x)
        return out


@same("raised RuntimeError in the next forward")
def going_on_after_an_error_in_backward(trial: Trial) -> None:
    """As when a batch ran out of memory and is left out by everybody."""
    module = same_start(Moody)
    with Course(trial, module) as course:
        model = trial.wrap(module)
        square(model(trial.data(3, 6))).backward()
        try:
            square(model(trial.data(3, 6), fails=True)).backward()
        except ValueError:
            model.zero_grad()
        course.point = "the next forward"
        for step in range(2):
            model.zero_grad()
            square(model(trial.data(3, 6, step=step))).backward()
        course.ends(module, lambda m, rank: square(m(trial.data(3, 6, step=1, rank=rank))).backward())


class Own:
    def __init__(self, out: torch.Tensor) -> None:
        self.out = out


class InAnObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Own:
        return Own(self.layer(x))


@same(("raised RuntimeError in backward", SILENT))
def outputs_in_an_object_with_find_unused(trial: Trial) -> None:
    module = same_start(InAnObject)
    with Course(trial, module) as course:
        model = trial.wrap(module, find_unused_parameters=True)
        course.point = "backward"
        for step in range(2):
            model.zero_grad()
            square(model(trial.data(3, 4, step=step)).out).backward()
        course.ends(module, lambda m, rank: square(m(trial.data(3, 4, step=1, rank=rank)).out).backward())


@same(SILENT)
def outputs_in_an_object_with_a_static_graph(trial: Trial) -> None:
    module = same_start(InAnObject)
    with Course(trial, module) as course:
        model = trial.wrap(module, static_graph=True)
        course.point = "backward"
        for step in range(2):
            model.zero_grad()
            square(model(trial.data(3, 4, step=step)).out).backward()
        course.ends(module, lambda m, rank: square(m(trial.data(3, 4, step=1, rank=rank)).out).backward())


@same("raised RuntimeError in the next forward")
def frozen_after_wrapping(trial: Trial) -> None:
    module = same_start(Mlp)
    with Course(trial, module) as course:
        model = trial.wrap(module)
        square(model(trial.data(4, 8))).backward()
        module.layers[0].requires_grad_(False)
        course.start.layers[0].requires_grad_(False)  # type: ignore[index]
        course.point = "the next forward"
        for step in range(2):
            model.zero_grad()
            square(model(trial.data(4, 8, step=step))).backward()
        course.ends(module, lambda m, rank: square(m(trial.data(4, 8, step=1, rank=rank))).backward())


@same(SILENT)
def thawed_after_wrapping(trial: Trial) -> None:
    module = same_start(Mlp)
    module.layers[0].requires_grad_(False)  # type: ignore[index]
    with Course(trial, module) as course:
        model = trial.wrap(module)
        module.layers[0].requires_grad_(True)  # type: ignore[index]
        course.start.requires_grad_(True)
        course.point = "forward"
        square(model(trial.data(4, 8))).backward()
        course.ends(module, lambda m, rank: square(m(trial.data(4, 8, rank=rank))).backward())


@same(SILENT)
def added_after_wrapping(trial: Trial) -> None:
    module = same_start(lambda: nn.Sequential(nn.Linear(4, 4)))
    with Course(trial, module) as course:
        model = trial.wrap(module)
        torch.manual_seed(0)
        module.add_module("added", nn.Linear(4, 4))
        course.start = copy.deepcopy(module)
        course.point = "forward"
        square(model(trial.data(3, 4))).backward()
        course.ends(module, lambda m, rank: square(m(trial.data(3, 4, rank=rank))).backward())


@same(SILENT)
def the_inner_module_called_directly(trial: Trial) -> None:
    module = same_start(Mlp)
    with Course(trial, module) as course:
        model = trial.wrap(module)
        course.point = "backward"
        square(model.module(trial.data(4, 8))).backward()
        course.ends(module, lambda m, rank: square(m(trial.data(4, 8, rank=rank))).backward())


@better(torch="raised RuntimeError in pickling", ours=RIGHT)
def pickled_with_a_group_of_its_own(trial: Trial) -> None:
    """It comes back on the default group, as one would expect of a file."""
    module = same_start(Mlp)
    group = dist.new_group(list(range(trial.world_size)))
    with Course(trial, module) as course:
        model = trial.wrap(module, process_group=group)
        course.point = "pickling"
        model = pickle.loads(pickle.dumps(model))
        square(model(trial.data(4, 8))).backward()
        course.ends(model.module, lambda m, rank: square(m(trial.data(4, 8, rank=rank))).backward())


@better(torch=("raised RuntimeError in backward", SILENT), ours=RIGHT)
def backward_makes_a_graph(trial: Trial) -> None:
    """backward(create_graph=True) averages the gradients; what comes of their graph is not promised."""
    module = same_start(lambda: nn.Linear(4, 1))
    with Course(trial, module) as course:
        model = trial.wrap(module)
        course.point = "backward"
        square(model(trial.data(3, 4))).backward(create_graph=True)
        course.ends(module, lambda m, rank: square(m(trial.data(3, 4, rank=rank))).backward())
        for parameter in model.parameters():
            parameter.grad = None


@better(torch="silently wrong", ours=RIGHT)
def a_copy_of_a_model_with_a_static_graph(trial: Trial) -> None:
    module = same_start(Mlp)
    with Course(trial, module) as course:
        model = trial.wrap(module, static_graph=True)
        square(model(trial.data(4, 8))).backward()
        model.zero_grad()
        other = copy.deepcopy(model)
        course.point = "backward"
        for step in range(2):
            other.zero_grad()
            square(other(trial.data(4, 8, step=step))).backward()
        course.ends(other.module, lambda m, rank: square(m(trial.data(4, 8, step=1, rank=rank))).backward())


@better(torch=("raised AttributeError in construction", "raised TypeError in construction"), ours=RIGHT)
def round_robin_over_several_groups(trial: Trial) -> None:
    module = same_start(Mlp)
    groups = [dist.new_group(list(range(trial.world_size))) for _ in range(3)]
    with Course(trial, module) as course:
        model = trial.wrap(module, process_group=groups, bucket_cap_mb=0.0002)
        course.point = "backward"
        for step in range(3):
            model.zero_grad()
            square(model(trial.data(4, 8, step=step))).backward()
        course.ends(module, lambda m, rank: square(m(trial.data(4, 8, step=2, rank=rank))).backward())


@better(
    torch=(),
    ours="raised RuntimeError in construction",
    says={"outcome": [r"\b1\.weight", "rank 1"]},
    world_size=3,
)
def one_rank_of_three_has_another_shape(trial: Trial) -> None:
    """Told to all; under torch only to rank 0 and the odd one, while the third goes on alone."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5 if trial.rank == 1 else 4))
    with Course(trial, module):
        trial.wrap(module)


@better(
    torch=(),
    ours="raised RuntimeError in construction",
    says={"outcome": ["'mask'", "rank 1"]},
)
def one_rank_has_another_buffer(trial: Trial) -> None:
    """Under torch's class the first collective waits for ever, or copies what it should not."""
    module = nn.Linear(4, 4)
    module.register_buffer("mask", torch.ones(2 + trial.rank))
    with Course(trial, module):
        trial.wrap(module)


class InWhateverOrder(nn.Module):
    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(4, 4))
            nn.init.constant_(getattr(self, name).weight, 1.0 if name == "a" else -2.0)
            nn.init.zeros_(getattr(self, name).bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu())


@better(
    torch=SILENT,
    ours="raised RuntimeError in construction",
    says={"outcome": [r"'b\.weight'", r"'a\.weight'", "rank 1"]},
)
def layers_in_another_order_on_one_rank(trial: Trial) -> None:
    module = InWhateverOrder("ba" if trial.rank == 1 else "ab")

    def work(m: Any, rank: int) -> None:
        square(m(trial.data(4, 4, rank=rank))).backward()

    with Course(trial, module) as course:
        work(trial.wrap(module), trial.rank)
        course.ends(module, work)


@better(torch="raised TypeError in registering", ours=(RIGHT, "raised TypeError in registering"))
def compression_to_bf16_without_a_gpu(trial: Trial) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    module = same_start(Mlp)
    with Course(trial, module) as course:
        model = trial.wrap(module)
        course.point = "registering"
        model.register_comm_hook(None, bf16_compress_hook)
        course.point = "backward"
        square(model(trial.data(4, 8))).backward()
        expected = course.average(lambda m, rank: square(m(trial.data(4, 8, rank=rank))).backward())
        close = [
            torch.allclose(p.grad, expected[n], rtol=2e-2, atol=1e-4) for n, p in module.named_parameters()
        ]
        trial.note("outcome", RIGHT if all(close) else SILENT)


@better(torch="raised RuntimeError in forward", ours=(RIGHT, "raised RuntimeError in forward"))
def mixed_precision_without_a_gpu(trial: Trial) -> None:
    """Parameters and gradients compute and travel narrow; what the optimizer sees is wide."""
    from torch.nn.parallel.distributed import _MixedPrecision

    module = same_start(Mlp)
    with Course(trial, module) as course:
        narrow = _MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
        model = trial.wrap(module, mixed_precision=narrow)
        course.point = "forward"
        out = model(trial.data(4, 8))
        course.point = "backward"
        square(out).backward()
        expected = course.average(lambda m, rank: square(m(trial.data(4, 8, rank=rank))).backward())
        parameters = dict(module.named_parameters())
        close = [
            torch.allclose(p.grad.float(), expected[n], rtol=0.1, atol=2e-2) for n, p in parameters.items()
        ]
        wide = [p.dtype == p.grad.dtype == torch.float32 for p in parameters.values()]
        trial.note("outcome", RIGHT if all(close) and all(wide) else SILENT)


@same(("raised RuntimeError in backward", SILENT))
def a_forward_within_a_backward(trial: Trial) -> None:
    """A checkpoint around the whole model computes it again while the backward of its output's forward runs."""
    module = same_start(Mlp)

    def work(m: Any, step: int, rank: int) -> None:
        inner = checkpoint(m, trial.data(4, 8, step=step, rank=rank).requires_grad_(), use_reentrant=True)
        square(m(inner)).backward()

    with Course(trial, module) as course:
        model = trial.wrap(module, bucket_cap_mb=0.0002)
        course.point = "backward"
        for step in range(5):
            model.zero_grad()
            work(model, step, trial.rank)
        course.ends(module, lambda m, rank: work(m, 4, rank))


@better(torch=(), ours=RIGHT)
def a_static_graph_that_a_rank_without_input_never_sees(trial: Trial) -> None:
    """In the first step those with input tell each other what they used, and the one without must listen."""
    module = same_start(Mlp)

    def work(m: Any, step: int, rank: int) -> None:
        if rank == 1:
            square(m(trial.data(4, 8, step=step, rank=rank))).backward()

    with Course(trial, module) as course:
        model = trial.wrap(module, static_graph=True, find_unused_parameters=True)
        course.point = "joining"
        with model.join():
            for step in range(3 * trial.rank):
                model.zero_grad()
                work(model, step, trial.rank)
        if trial.rank == 1:
            course.ends(module, lambda m, rank: work(m, 2, rank))
        else:
            trial.note("outcome", RIGHT)
