"""The plain loop, in its many dresses: optimizers, options, dtypes, accumulation, clipping, mixed precision."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from models import Convolutions, MixedTypes, Mlp, SometimesUnused, observe, square, train
from register import case
from torch import nn

if TYPE_CHECKING:
    from trial import Trial

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@case(
    2,
    4,
    plain=({},),
    as_view=({"gradient_as_bucket_view": True},),
    one_megabyte=({"bucket_cap_mb": 1},),
    tiny_buckets=({"bucket_cap_mb": 0.0003},),
    tiny_buckets_as_view=({"bucket_cap_mb": 0.0003, "gradient_as_bucket_view": True},),
    bucket_list=({"bucket_cap_mb_list": [1, 2, 3]},),
    find_unused=({"find_unused_parameters": True},),
    find_unused_as_view=({"find_unused_parameters": True, "gradient_as_bucket_view": True},),
    static=({"static_graph": True},),
    static_as_view=({"static_graph": True, "gradient_as_bucket_view": True},),
    static_tiny_buckets=({"static_graph": True, "bucket_cap_mb": 0.0003},),
    batched_copy=({"batched_grad_copy": True},),
    batched_copy_tiny=({"batched_grad_copy": True, "bucket_cap_mb": 0.0003},),
    skip_unused=({"find_unused_parameters": True, "skip_all_reduce_unused_params": True},),
)
def options(trial: Trial, given: dict[str, Any]) -> None:
    train(trial, trial.wrap(Mlp(), **given), lambda step: trial.data(4, 8, step=step))


@case(keep=(False, False), none=(True, False), keep_view=(False, True), none_view=(True, True))
def zeroing(trial: Trial, set_to_none: bool, as_view: bool) -> None:
    model = trial.wrap(Mlp(), gradient_as_bucket_view=as_view)
    train(trial, model, lambda step: trial.data(4, 8, step=step), set_to_none=set_to_none)


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adam_fused": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


@case(**{name: (name, as_view) for name in OPTIMIZERS for as_view in (False,)}, adam_as_view=("adam", True))
def optimizers(trial: Trial, name: str, as_view: bool) -> None:
    model = trial.wrap(Mlp(), gradient_as_bucket_view=as_view)
    optimizer = OPTIMIZERS[name](model.parameters())
    train(trial, model, lambda step: trial.data(4, 8, step=step), optimizer, steps=4)


@case(2, 4, **{name: (name,) for name in DTYPES})
def one_dtype(trial: Trial, name: str) -> None:
    dtype = DTYPES[name]
    train(trial, trial.wrap(Mlp(dtype=dtype)), lambda step: trial.data(4, 8, step=step, dtype=dtype))


MIXED = {
    "wide_and_narrow": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    "complex": (torch.complex64, torch.float32),
    "double_complex": (torch.complex128, torch.float64, torch.complex64),
    "alternating": (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16, torch.float32),
}


@case(
    2,
    **{name: (name, {}) for name in MIXED},
    **{f"{name}_as_view": (name, {"gradient_as_bucket_view": True}) for name in MIXED},
    wide_tiny_buckets=("wide_and_narrow", {"bucket_cap_mb": 0.00005}),
    alternating_tiny_buckets=("alternating", {"bucket_cap_mb": 0.00005}),
)
def mixed_dtypes(trial: Trial, name: str, given: dict[str, Any]) -> None:
    model = trial.wrap(MixedTypes(*MIXED[name]), **given)
    train(trial, model, lambda step: trial.data(5, 3, step=step), loss_of=lambda out: out)


@case(
    2,
    plain=({}, None),
    as_view=({"gradient_as_bucket_view": True}, None),
    channels_last=({}, torch.channels_last),
    channels_last_as_view=({"gradient_as_bucket_view": True}, torch.channels_last),
    channels_last_tiny=({"bucket_cap_mb": 0.0002}, torch.channels_last),
)
def convolutions(trial: Trial, given: dict[str, Any], memory_format: Any) -> None:
    module = Convolutions()
    if memory_format is not None:
        module = module.to(memory_format=memory_format)
    model = trial.wrap(module, **given)

    def batch(step: int) -> torch.Tensor:
        x = trial.data(2, 3, 8, 8, step=step)
        return x if memory_format is None else x.contiguous(memory_format=memory_format)

    train(trial, model, batch)


class OddStrides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(4, 6).t())
        self.gapped = nn.Parameter(torch.randn(6, 8)[:, ::2])
        self.straight = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.turned + self.straight) * (x @ self.gapped)


@case(2, plain=({},), as_view=({"gradient_as_bucket_view": True},))
def odd_strides(trial: Trial, given: dict[str, Any]) -> None:
    train(trial, trial.wrap(OddStrides(), **given), lambda step: trial.data(3, 6, step=step))


@case(2, 3, every=(1,), second=(2,), third=(3,))
def accumulation_under_no_sync(trial: Trial, cadence: int) -> None:
    model = trial.wrap(Mlp(), bucket_cap_mb=0.0003)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        synced = (step + 1) % cadence == 0
        with nullcontext() if synced else model.no_sync():
            square(model(trial.data(4, 8, step=step))).backward()
        observe(trial, f"step {step}", model, alike=synced)
        if synced:
            optimizer.step()
            optimizer.zero_grad()


@case(2, plain=({},), as_view=({"gradient_as_bucket_view": True},))
def accumulation_without_no_sync(trial: Trial, given: dict[str, Any]) -> None:
    """Each backward averages all of `.grad`, what was averaged before included."""
    model = trial.wrap(Mlp(), **given)
    for step in range(3):
        square(model(trial.data(4, 8, step=step))).backward()
        observe(trial, f"step {step}", model)


@case(2, plain=({},), as_view=({"gradient_as_bucket_view": True},), static=({"static_graph": True},))
def accumulation_begins_after_a_synced_step(trial: Trial, given: dict[str, Any]) -> None:
    model = trial.wrap(Mlp(), **given)
    for step, synced in enumerate((True, False, True, True, False, False, True)):
        with nullcontext() if synced else model.no_sync():
            square(model(trial.data(4, 8, step=step))).backward()
        observe(trial, f"step {step}", model, alike=False)


@case(norm=("norm",), value=("value",))
def clipping(trial: Trial, how: str) -> None:
    model = trial.wrap(Mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(3):
        square(10 * model(trial.data(4, 8, step=step))).backward()
        if how == "norm":
            trial.note("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1), alike=True)
        else:
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        observe(trial, f"step {step}", model)
        optimizer.step()
        optimizer.zero_grad()


@case(bf16=(torch.bfloat16,), fp16=(torch.float16,))
def autocast(trial: Trial, dtype: torch.dtype) -> None:
    model = trial.wrap(Mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        with torch.autocast("cpu", dtype=dtype):
            out = model(trial.data(4, 8, step=step))
            trial.note("dtype of the output", str(out.dtype))
        square(out).backward()
        observe(trial, f"step {step}", model)
        optimizer.step()
        optimizer.zero_grad()


@case(finite=(False,), infinite=(True,))
def scaled_gradients(trial: Trial, overflow: bool) -> None:
    """An overflow on one rank is one on all: all of them leave the step out, and halve the scale."""
    model = trial.wrap(Mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = square(model(trial.data(4, 8, step=step)))
        if overflow and step == 1 and trial.rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        trial.note("scale", scaler.get_scale(), alike=True)
        for name, parameter in model.named_parameters():
            trial.note(f"step {step} {name}", parameter, alike=True)
        optimizer.zero_grad()


@case(2, 4, plain=({},), as_view=({"gradient_as_bucket_view": True},), tiny=({"bucket_cap_mb": 0.0003},))
def like_one_process(trial: Trial, given: dict[str, Any]) -> None:
    """The same as training alone on everybody's data."""
    import copy

    import torch.distributed as dist

    torch.manual_seed(0)
    alone = Mlp(dtype=torch.float64)
    model = trial.wrap(copy.deepcopy(alone), **given)
    ours, its = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, alone))
    for step in range(4):
        mine = trial.data(4, 8, step=step, dtype=torch.float64)
        everybodys = [torch.empty_like(mine) for _ in range(trial.world_size)]
        dist.all_gather(everybodys, mine)
        for m, batch, optimizer in ((model, mine, ours), (alone, torch.cat(everybodys), its)):
            optimizer.zero_grad()
            m(batch).pow(2).mean().backward()
            optimizer.step()
        near = [
            torch.allclose(a, b, rtol=1e-10)
            for a, b in zip(model.parameters(), alone.parameters(), strict=True)
        ]
        trial.note(f"step {step}: as if alone", near)
        trial.note("all near", all(near))


@case(2, 4, plain=({},), as_view=({"gradient_as_bucket_view": True},), tiny=({"bucket_cap_mb": 0.0003},))
def average_is_the_mean(trial: Trial, given: dict[str, Any]) -> None:
    """Whole numbers, so that the mean has one value whatever the order of the sum."""
    model = trial.wrap(Mlp(depth=2, dtype=torch.float64), **given)
    for step in range(3):
        model.zero_grad()
        weights = [
            torch.full_like(p, 4.0 * (trial.rank + step + i)) for i, p in enumerate(model.parameters())
        ]
        pairs = zip(model.parameters(), weights, strict=True)
        out = model(trial.data(2, 8, dtype=torch.float64))
        (0 * out.sum() + sum((p * w).sum() for p, w in pairs)).backward()
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            trial.note("mean", parameter.grad, alike=True)
            trial.note("right", torch.equal(parameter.grad, trial.mean_over_ranks(weight)))


@case(2, plain=({},), as_view=({"gradient_as_bucket_view": True},), find=({"find_unused_parameters": True},))
def train_and_eval_take_turns(trial: Trial, given: dict[str, Any]) -> None:
    model = trial.wrap(Convolutions(), **given)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model.train()
        square(model(trial.data(2, 3, 8, 8, step=step))).backward()
        observe(trial, f"step {step}", model)
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            trial.note(f"step {step}: evaluated", model(trial.data(2, 3, 8, 8, step=9)))


@case()
def evaluation_on_one_rank_only(trial: Trial) -> None:
    """In eval mode and without gradients a model with buffers to share still shares them: torch's rule is kept
    on the inner module only."""
    model = trial.wrap(Convolutions())
    square(model(trial.data(2, 3, 8, 8))).backward()
    if trial.rank == 0:
        model.eval()
        with torch.no_grad():
            trial.note("evaluated", model.module(trial.data(2, 3, 8, 8)))
        model.train()
    square(model(trial.data(2, 3, 8, 8, step=1))).backward()
    observe(trial, "after", model)


@case(2, plain=({},), as_view=({"gradient_as_bucket_view": True},))
def batch_sizes_change(trial: Trial, given: dict[str, Any]) -> None:
    model = trial.wrap(Mlp(), **given)
    train(trial, model, lambda step: trial.data(1 + step + trial.rank, 8, step=step))


@case(2, 3, find=({"find_unused_parameters": True},), static=({"static_graph": True},))
def layers_left_out(trial: Trial, given: dict[str, Any]) -> None:
    model = trial.wrap(SometimesUnused(), **given)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        square(model(trial.data(3, 6, step=step), used=(0, 2))).backward()
        observe(trial, f"step {step}", model)
        optimizer.step()


@case(single=({},), view=({"gradient_as_bucket_view": True},))
def one_rank(trial: Trial, given: dict[str, Any]) -> None:
    """A group of one: each rank in its own."""
    import torch.distributed as dist

    alone = [dist.new_group([number]) for number in range(trial.world_size)][trial.rank]
    model = trial.wrap(Mlp(), process_group=alone, **given)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        square(model(trial.data(4, 8, step=step))).backward()
        observe(trial, f"step {step}", model, alike=False)
        optimizer.step()


@case(
    scale=("scale", "parameter", {}),
    scale_tiny=("scale", "parameter", {"bucket_cap_mb": 0.0003}),
    drop=("drop", "parameter", {}),
    drop_layer=("drop", "layer", {"bucket_cap_mb": 0.0003}),
    drop_unused=("drop", "parameter", {"find_unused_parameters": True}),
    see=("see", "layer", {"find_unused_parameters": True}),
    scale_static=("scale", "layer", {"static_graph": True}),
)
def hooks_that_use_the_gradients_of_others(trial: Trial, act: str, on: str, given: dict[str, Any]) -> None:
    """torch's class takes each gradient when it arrives. What hooks see and change later has nothing to do with it."""
    module = Mlp()
    names = {parameter: name for name, parameter in module.named_parameters()}

    def hook(own: torch.Tensor | None) -> None:
        for parameter, name in names.items():
            if parameter is own or parameter.grad is None:
                continue
            trial.note(f"seen {name}", parameter.grad.clone())
            if act == "scale":
                parameter.grad.mul_(3)
            elif act == "drop":
                parameter.grad = None

    if on == "layer":
        for layer in module.layers:
            layer.register_full_backward_hook(lambda *_: hook(None))
    else:
        for parameter in names:
            parameter.register_post_accumulate_grad_hook(hook)
    train(trial, trial.wrap(module, **given), lambda step: trial.data(4, 8, step=step), set_to_none=False)
