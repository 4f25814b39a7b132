"""Modules of every shape: tied, empty and sparse parameters, outputs of every form, parameters frozen and thawed."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from models import Mlp, SometimesUnused, Tied, observe, square, train
from register import case
from torch import nn

if TYPE_CHECKING:
    from trial import Trial

VIEW = {"gradient_as_bucket_view": True}
UNUSED = {"find_unused_parameters": True}
TINY = {"bucket_cap_mb": 0.0002}


def words(trial: Trial, step: int, size: int = 7) -> torch.Tensor:
    source = torch.Generator().manual_seed(100 * trial.rank + step)
    return torch.randint(0, size, (6,), generator=source)


@case(2, 3, plain=({},), as_view=(VIEW,), tiny=(TINY,), find=(UNUSED,), static=({"static_graph": True},))
def tied(trial: Trial, given: dict[str, Any]) -> None:
    train(trial, trial.wrap(Tied(), **given), lambda step: words(trial, step))


@case(2, plain=({},), as_view=(VIEW,))
def one_module_used_twice(trial: Trial, given: dict[str, Any]) -> None:
    layer = nn.Linear(6, 6)
    model = trial.wrap(nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(6, 6)), **given)
    train(trial, model, lambda step: trial.data(3, 6, step=step))


class WithEmpty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.layer = nn.Linear(4, 4)
        self.nothing = nn.Parameter(torch.empty(0))
        self.single = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x)) * self.single + self.empty.sum() + self.nothing.sum()


@case(2, plain=({},), as_view=(VIEW,), tiny=(TINY,), find=(UNUSED,))
def empty_and_scalar_parameters(trial: Trial, given: dict[str, Any]) -> None:
    train(trial, trial.wrap(WithEmpty(), **given), lambda step: trial.data(3, 4, step=step))


class Bag(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(7, 4, sparse=sparse, mode="sum")
        self.other = nn.Embedding(7, 4, sparse=sparse)
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(self.bag(x.view(2, 3)) * torch.tanh(self.other(x[:2])))
        return out


@case(2, 3, plain=({},), as_view=(VIEW,), static=({"static_graph": True},), tiny=(TINY,))
def sparse_embeddings(trial: Trial, given: dict[str, Any]) -> None:
    model = trial.wrap(Bag(sparse=True), **given)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(trial, model, lambda step: words(trial, step), optimizer)


@case()
def sparse_with_its_own_optimizer(trial: Trial) -> None:
    model = trial.wrap(nn.Embedding(7, 4, sparse=True))
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    train(trial, model, lambda step: words(trial, step), optimizer)


Pair = namedtuple("Pair", ["first", "second"])


class Named(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclass
class Result:
    first: torch.Tensor
    second: torch.Tensor


class Own:
    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        self.first, self.second = first, second


FORMS: dict[str, Any] = {
    "tuple": lambda a, b: (a, b),
    "list": lambda a, b: [a, b],
    "dict": lambda a, b: {"first": a, "second": b},
    "ordered": lambda a, b: OrderedDict(first=a, second=b),
    "nested": lambda a, b: {"both": [(a,), {"inner": (b, None, 3)}]},
    "namedtuple": Pair,
    "typed_namedtuple": Named,
    "dataclass": Result,
    "with_words": lambda a, b: (a, "text", None, {"b": b, "n": 1}),
}


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [each for item in value.values() for each in tensors_in(item)]
    if isinstance(value, list | tuple):
        return [each for item in value for each in tensors_in(item)]
    return tensors_in(list(vars(value).values())) if hasattr(value, "__dict__") else []


class Formed(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.a, self.b, self.unused = (nn.Linear(4, 4) for _ in range(3))
        self.form = form

    def forward(self, x: torch.Tensor) -> Any:
        return FORMS[self.form](self.a(x), self.b(x))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "find": UNUSED,
    "static": {"static_graph": True},
}


# torch's static graph does not see into a dataclass: that one is among the cases where we promise more.
SEEN_INTO = [
    (form, name) for form in FORMS for name in ("find", "static") if (form, name) != ("dataclass", "static")
]


@case(2, **{f"{form}_{name}": (form, name) for form, name in SEEN_INTO})
def outputs(trial: Trial, form: str, options: str) -> None:
    """`static` learns the unused in its first step; `find` walks from what it finds in the output."""
    model = trial.wrap(Formed(form), **OPTIONS[options])
    for step in range(3):
        model.zero_grad()
        out = model(trial.data(3, 4, step=step))
        trial.note("form", f"{type(out).__name__} of {len(tensors_in(out))}")
        sum(square(each) for each in tensors_in(out)).backward()
        observe(trial, f"step {step}", model)


@case(2, plain=("plain",), find=("find",))
def outputs_in_an_object(trial: Trial, options: str) -> None:
    FORMS["own"] = Own
    module = Formed("own")
    module.unused = nn.Identity()
    model = trial.wrap(module, **{**OPTIONS[options], "find_unused_parameters": False})
    for step in range(2):
        out = model(trial.data(3, 4, step=step))
        (square(out.first) + square(out.second)).backward()
        observe(trial, f"step {step}", model)


@case()
def outputs_without_gradients(trial: Trial) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            return self.layer(x), x.detach(), torch.zeros(2, dtype=torch.long)

    model = trial.wrap(Mixed())
    for step in range(3):
        out, kept, number = model(trial.data(3, 4, step=step))
        trial.note("kept", [kept.requires_grad, number.requires_grad, out.requires_grad])
        square(out).backward()
        observe(trial, f"step {step}", model)


@case(2, args=("args",), kwargs=("kwargs",), nested=("nested",))
def inputs(trial: Trial, form: str) -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Any, y: Any = None, *, z: Any = None) -> torch.Tensor:
            values = tensors_in([x, y, z])
            out: torch.Tensor = self.layer(sum(values))
            return out

    model = trial.wrap(Many())
    a, b = trial.data(3, 4), trial.data(3, 4, step=1)
    out = {
        "args": lambda: model(a, b),
        "kwargs": lambda: model(x=a, y=b, z=a),
        "nested": lambda: model([a, {"b": b}], z=(a,)),
    }[form]()
    square(out).backward()
    observe(trial, "after", model)


@case()
def gradients_of_inputs(trial: Trial) -> None:
    """A backward gives the input's gradient as well; that is the rank's own."""
    model = trial.wrap(Mlp())
    for step in range(2):
        x = trial.data(4, 8, step=step).requires_grad_()
        square(model(x)).backward()
        trial.note("input", x.grad)
        observe(trial, f"step {step}", model)
        model.zero_grad()


@case(2, plain=({},), as_view=(VIEW,), find=(UNUSED,))
def frozen_from_the_start(trial: Trial, given: dict[str, Any]) -> None:
    module = Mlp()
    module.layers[1].requires_grad_(False)
    module.layers[2].bias.requires_grad_(False)
    train(trial, trial.wrap(module, **given), lambda step: trial.data(4, 8, step=step))


@case(2, find=(UNUSED,), find_as_view=({**UNUSED, **VIEW},))
def frozen_later_with_find_unused(trial: Trial, given: dict[str, Any]) -> None:
    module = Mlp()
    model = trial.wrap(module, **given)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        if step == 2:
            module.layers[0].requires_grad_(False)
        optimizer.zero_grad()
        square(model(trial.data(4, 8, step=step))).backward()
        observe(trial, f"step {step}", model)
        optimizer.step()


@case()
def wrapped_anew_after_thawing(trial: Trial) -> None:
    module = Mlp()
    module.layers[0].requires_grad_(False)
    first = trial.wrap(module)
    square(first(trial.data(4, 8))).backward()
    observe(trial, "frozen", first)
    del first
    module.zero_grad()
    module.layers[0].requires_grad_(True)
    second = trial.wrap(module)
    train(trial, second, lambda step: trial.data(4, 8, step=step))


@case(2, plain=({},), view=(VIEW,))
def two_models_side_by_side(trial: Trial, given: dict[str, Any]) -> None:
    one, two = trial.wrap(Mlp(), **given), trial.wrap(Mlp(depth=2), **given)
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        square(two(one(trial.data(4, 8, step=step)))).backward()
        observe(trial, f"step {step}: one", one)
        observe(trial, f"step {step}: two", two)
        optimizer.step()


@case(2, plain=({},), view=(VIEW,))
def adversaries(trial: Trial, given: dict[str, Any]) -> None:
    """Two optimizers, one network frozen while the other learns, as generative adversaries do."""
    maker, judge = trial.wrap(Mlp(depth=2), **given), trial.wrap(Mlp(depth=2), **given)
    makers, judges = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (maker, judge))
    for step in range(3):
        noise = trial.data(4, 8, step=step)
        judges.zero_grad()
        square(judge(maker(noise).detach())).backward()
        observe(trial, f"step {step}: judge", judge)
        judges.step()
        makers.zero_grad()
        (-square(judge(maker(noise)))).backward()
        observe(trial, f"step {step}: maker", maker)
        makers.step()


@case(2, plain=({},), static=({"static_graph": True},))
def parts_wrapped_separately(trial: Trial, given: dict[str, Any]) -> None:
    """DDP within a plain module: only that part is averaged."""
    outer = nn.Sequential(nn.Linear(8, 8), trial.wrap(Mlp(), **given), nn.Linear(8, 8))
    for step in range(2):
        outer.zero_grad()
        square(outer(trial.data(4, 8, step=step))).backward()
        observe(trial, f"step {step}: outer", outer, alike=False)
        observe(trial, f"step {step}: inner", outer[1])


@case(2, plain=({},), view=(VIEW,), tiny=({"bucket_cap_mb": 0.001},))
def many_small_parameters(trial: Trial, given: dict[str, Any]) -> None:
    module = nn.ParameterList(nn.Parameter(torch.randn(1 + i % 5)) for i in range(120))

    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([torch.tanh(part * x[i % 4]).sum() for i, part in enumerate(self.parts)])

    train(trial, trial.wrap(Summed(), **given), lambda step: trial.data(4, step=step), steps=2)


@case(2, plain=({},), view=(VIEW,), batched=({"batched_grad_copy": True},))
def larger_than_a_bucket(trial: Trial, given: dict[str, Any]) -> None:
    module = nn.Sequential(nn.Linear(600, 700), nn.Tanh(), nn.Linear(700, 5))
    model = trial.wrap(module, bucket_cap_mb=1, **given)
    for step in range(2):
        model.zero_grad()
        square(model(trial.data(2, 600, step=step))).backward()
        for name, parameter in model.named_parameters():
            trial.note(f"step {step} {name}", parameter.grad.sum(0), alike=True)


@case()
def recurrent(trial: Trial) -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 6, num_layers=2, batch_first=True)
            self.out = nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen, _ = self.lstm(x)
            out: torch.Tensor = self.out(seen[:, -1])
            return out

    train(trial, trial.wrap(Reader()), lambda step: trial.data(2, 5, 4, step=step), steps=2)


@case()
def attention(trial: Trial) -> None:
    torch.manual_seed(0)
    module = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    train(trial, trial.wrap(module), lambda step: trial.data(2, 5, 8, step=step), steps=2)


@case(2, find=(UNUSED,), static=({"static_graph": True},))
def never_used(trial: Trial, given: dict[str, Any]) -> None:
    """The gradient of a parameter that no rank uses stays what it was: nothing."""
    model = trial.wrap(SometimesUnused(depth=3), **given)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(3):
        optimizer.zero_grad()
        square(model(trial.data(3, 6, step=step), used=(0, 1))).backward()
        observe(trial, f"step {step}", model)
        optimizer.step()


@case(2, find=(UNUSED,), find_view=({**UNUSED, **VIEW},))
def a_gradient_kept_where_unused(trial: Trial, given: dict[str, Any]) -> None:
    """Zeroed, not removed: unused everywhere, it stays as it is, whatever it is."""
    model = trial.wrap(SometimesUnused(depth=3), **given)
    for step, used in enumerate([(0, 1, 2), (0, 1), (0, 2), (0, 1, 2)]):
        square(model(trial.data(3, 6, step=step), used=used)).backward()
        observe(trial, f"step {step}", model)
