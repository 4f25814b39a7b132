"""Copies, pickles, state dicts, and other libraries that look into a wrapped model."""

from __future__ import annotations

import copy
import io
import pickle
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from models import Buffered, Convolutions, Mlp, buffers, observe, square, train
from register import case

if TYPE_CHECKING:
    from trial import Trial


@case(2, fresh=(0,), used=(2,))
def state_dict(trial: Trial, steps: int) -> None:
    model = trial.wrap(Convolutions())
    for step in range(steps):
        square(model(trial.data(2, 3, 8, 8, step=step))).backward()
    found = model.state_dict()
    trial.note("keys", list(found))
    trial.note("versions", str({key: dict(value) for key, value in found._metadata.items()}))
    for name, value in found.items():
        trial.note(name, value)


@case(2, into_torchs=(True,), from_torchs=(False,))
def state_dict_of_the_other_class(trial: Trial, into: bool) -> None:
    one: Any = trial.wrap(Convolutions())
    other: Any = torch.nn.parallel.DistributedDataParallel(Convolutions())
    giver, taker = (one, other) if into else (other, one)
    square(giver(trial.data(2, 3, 8, 8))).backward()
    trial.note("loaded", str(taker.load_state_dict(giver.state_dict())))
    taker.zero_grad()
    square(taker(trial.data(2, 3, 8, 8, step=1))).backward()
    observe(trial, "after", taker)
    buffers(trial, "after", taker)


@case()
def state_dict_of_the_module_within(trial: Trial) -> None:
    from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

    model = trial.wrap(Mlp())
    found = model.state_dict()
    consume_prefix_in_state_dict_if_present(found, "module.")
    trial.note("loaded", str(Mlp().load_state_dict(found)))
    trial.note("keys", list(found))


@case()
def loaded_between_steps(trial: Trial) -> None:
    model = trial.wrap(Mlp(), gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    kept = None
    for step in range(5):
        optimizer.zero_grad()
        square(model(trial.data(4, 8, step=step))).backward()
        optimizer.step()
        observe(trial, f"step {step}", model)
        if step == 1:
            kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if step == 3 and kept is not None:
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])


@case(plain=({},), view=({"gradient_as_bucket_view": True},), find=({"find_unused_parameters": True},))
def deep_copies(trial: Trial, given: dict[str, Any]) -> None:
    model = trial.wrap(Buffered(), **given)
    square(model(trial.data(4, 4))).backward()
    model.zero_grad()
    other = copy.deepcopy(model)
    trial.note("class kept", type(other) is type(model))
    trial.note("apart", all(a is not b for a, b in zip(model.parameters(), other.parameters(), strict=True)))
    for step in range(2):
        for name, each in (("model", model), ("copy", other)):
            each.zero_grad()
            square(each(trial.data(4, 4, step=step))).backward()
            observe(trial, f"step {step} {name}", each)
            buffers(trial, f"step {step} {name}", each)


@case(pickle=("pickle",), save=("save",))
def written_and_read(trial: Trial, how: str) -> None:
    model = trial.wrap(Buffered(), find_unused_parameters=True)
    square(model(trial.data(4, 4))).backward()
    if how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        stream = io.BytesIO()
        torch.save(model, stream)
        other = torch.load(io.BytesIO(stream.getvalue()), weights_only=False)
    trial.note("kept", [type(other) is type(model), other.find_unused_parameters])
    other.zero_grad()
    for step in range(2):
        other.zero_grad()
        square(other(trial.data(4, 4, step=step))).backward()
        observe(trial, f"step {step}", other)
        buffers(trial, f"step {step}", other)


@case(2, adam=(torch.optim.Adam,), sgd=(torch.optim.SGD,))
def sharded_optimizer_state(trial: Trial, kind: Any) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = trial.wrap(Mlp())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=kind, lr=0.01)
    train(trial, model, lambda step: trial.data(4, 8, step=step), optimizer)


@case()
def checkpointing_library(trial: Trial) -> None:
    """torch.distributed.checkpoint strips the wrapper's prefix if it knows the wrapper."""
    from torch.distributed.checkpoint import state_dict as dcp

    model = trial.wrap(Mlp())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    square(model(trial.data(4, 8))).backward()
    optimizer.step()
    states, optimizer_states = dcp.get_state_dict(model, optimizer)
    trial.note("model", sorted(states))
    trial.note("optimizer", sorted(optimizer_states["state"]))
    missing = dcp.set_model_state_dict(model, states)
    trial.note("loaded", str(missing))


@case()
def averaged_weights(trial: Trial) -> None:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model = trial.wrap(Mlp())
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        square(model(trial.data(4, 8, step=step))).backward()
        optimizer.step()
        average.update_parameters(model.module)
    observe(trial, "average", average)


@case()
def group_replaced(trial: Trial) -> None:
    model = trial.wrap(Mlp())
    square(model(trial.data(4, 8))).backward()
    model.zero_grad()
    model._update_process_group(dist.new_group(list(range(trial.world_size))))
    square(model(trial.data(4, 8, step=1))).backward()
    observe(trial, "after", model)


@case()
def hooks_removed(trial: Trial) -> None:
    """Without its hooks a backward leaves this rank's own gradients."""
    model = trial.wrap(Mlp())
    model._remove_autograd_hooks()
    square(model(trial.data(4, 8))).backward()
    observe(trial, "after", model, alike=False)


@case()
def dropped(trial: Trial) -> None:
    """When the wrapper is gone, the module trains alone."""
    import gc

    module = Mlp()
    model = trial.wrap(module)
    square(model(trial.data(4, 8))).backward()
    module.zero_grad()
    del model
    gc.collect()
    square(module(trial.data(4, 8, step=1))).backward()
    observe(trial, "after", module, alike=False)


@case()
def wrapped_by_accelerate(trial: Trial) -> None:
    """Accelerate unwraps by asking for torch's class."""
    from accelerate.utils import extract_model_from_parallel

    inner = Mlp()
    trial.note("unwrapped", extract_model_from_parallel(trial.wrap(inner)) is inner)


@case()
def half_of_a_model_on_another_dtype_later(trial: Trial) -> None:
    """model.to(dtype) after wrapping is a change that buckets did not expect."""
    model = trial.wrap(Mlp())
    trial.note("attributes", [model.module is not None, model.device.type])
    model.float()
    train(trial, model, lambda step: trial.data(4, 8, step=step), steps=2)
