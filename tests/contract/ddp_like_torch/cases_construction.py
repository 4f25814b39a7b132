"""What the constructor takes, refuses, checks across the ranks, and sends to them."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from models import Buffered, Convolutions, Mlp, SometimesUnused, buffers, observe, square, train
from register import case
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from trial import Trial


def frozen_module() -> nn.Module:
    return Mlp().requires_grad_(False)


def meta_and_cpu() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


def one_named(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [next(iter(module.named_parameters()))]


def mesh_2d() -> Any:
    return dist.device_mesh.init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("a", "b"))


def mesh() -> Any:
    return dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))


REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], dict[str, Any]]]] = {
    "nothing_to_train": (frozen_module, lambda m: {}),
    "no_parameters": (nn.ReLU, lambda m: {}),
    "two_device_ids": (Mlp, lambda m: {"device_ids": [0, 1]}),
    "device_ids_on_cpu": (Mlp, lambda m: {"device_ids": [0]}),
    "output_device_on_cpu": (Mlp, lambda m: {"output_device": 1}),
    "several_device_types": (meta_and_cpu, lambda m: {}),
    "lazy": (lambda: nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)), lambda m: {}),
    "group_and_mesh": (Mlp, lambda m: {"process_group": dist.group.WORLD, "device_mesh": mesh()}),
    "mesh_of_two_dimensions": (Mlp, lambda m: {"device_mesh": mesh_2d()}),
    "delayed_without_hook": (Mlp, lambda m: {"delay_all_reduce_named_params": one_named(m)}),
    "hook_without_delayed": (Mlp, lambda m: {"param_to_hook_all_reduce": next(m.parameters())}),
    "both_bucket_caps": (Mlp, lambda m: {"bucket_cap_mb": 1, "bucket_cap_mb_list": [1]}),
    "empty_bucket_list": (Mlp, lambda m: {"bucket_cap_mb_list": []}),
    "negative_bucket_list": (Mlp, lambda m: {"bucket_cap_mb_list": [1, -1]}),
    "unknown_option": (Mlp, lambda m: {"no_such_option": 1}),
    "no_bucket_size": (Mlp, lambda m: {"bucket_cap_mb": 0}),
    "negative_bucket_size": (Mlp, lambda m: {"bucket_cap_mb": -1}),
    "empty_device_ids": (Mlp, lambda m: {"device_ids": []}),
    "sync_batch_norm": (lambda: nn.SyncBatchNorm.convert_sync_batchnorm(Convolutions()), lambda m: {}),
}


@case(**{name: (name,) for name in REFUSED})
def refused(trial: Trial, name: str) -> None:
    make, options = REFUSED[name]
    module = make()
    given = options(module)
    trial.attempt("construction", lambda: trial.wrap(module, **given))


@case()
def sync_batch_norm_on_the_cpu(trial: Trial) -> None:
    model = trial.attempt(
        "construction", lambda: trial.wrap(nn.SyncBatchNorm.convert_sync_batchnorm(Convolutions()))
    )
    trial.attempt("forward", lambda: model(trial.data(2, 3, 8, 8)))


@case()
def without_a_group(trial: Trial) -> None:
    dist.destroy_process_group()
    trial.attempt("construction", lambda: trial.wrap(Mlp()))


@case(broadcast=("broadcast",), both=("both",), check=("check",), none=("none",))
def deprecated(trial: Trial, what: str) -> None:
    import warnings

    given = {
        "broadcast": {"broadcast_buffers": False},
        "both": {"broadcast_buffers": False, "forward_sync_buffers": True},
        "check": {"check_reduction": True},
        "none": {},
    }[what]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model = trial.wrap(Buffered(), **given)
    trial.note("warned", [each.category.__name__ for each in warned if "DDP" not in str(each.message)])
    trial.note("where", [each.filename.endswith("trial.py") for each in warned])
    trial.note("forward_sync_buffers", model.forward_sync_buffers)
    trial.note("broadcast_buffers", bool(model.broadcast_buffers))


@case(2, 4)
def state_of_rank_0_is_everybodys(trial: Trial) -> None:
    torch.manual_seed(17 + trial.rank)
    module = Buffered()
    module.total += trial.rank
    model = trial.wrap(module)
    for name, value in model.state_dict().items():
        trial.note(name, value, alike=True)


@case(2, 4)
def without_init_sync(trial: Trial) -> None:
    torch.manual_seed(17 + trial.rank)
    model = trial.wrap(Mlp(depth=1), init_sync=False)
    for name, value in model.state_dict().items():
        trial.note(name, value)
    square(model(trial.data(4, 8))).backward()
    for name, parameter in model.named_parameters():
        trial.note(f"{name}.grad", parameter.grad, alike=True)


@case(2, shape=("shape",), number=("number",), stride=("stride",), says={"construction": [r"\b1\b", "ank"]})
def models_that_differ(trial: Trial, how: str) -> None:
    """One rank has another model: every rank is told so at construction, and of which rank it is."""
    odd = trial.rank == 1
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5 if odd and how == "shape" else 4))
    if odd and how == "number":
        module.append(nn.Linear(4, 4))
    if odd and how == "stride":
        module[1].weight = nn.Parameter(torch.randn(4, 4).t())
    # Under torch one of the two waits in vain: briefly. Under ours none does, however late the other comes.
    group = dist.new_group(timeout=timedelta(seconds=60 if trial.is_ours else 2))
    trial.attempt("construction", lambda: trial.wrap(module, process_group=group))


@case(2, 4, group=("group",), mesh=("mesh",), named=("named",))
def on_a_group(trial: Trial, how: str) -> None:
    if how == "group":
        given: dict[str, Any] = {"process_group": dist.new_group(list(range(trial.world_size)))}
    elif how == "mesh":
        given = {"device_mesh": mesh()}
    else:
        whole = dist.device_mesh.init_device_mesh(
            "cpu", (trial.world_size, 1), mesh_dim_names=("data", "other")
        )
        given = {"process_group": whole.get_group("data")}
    train(trial, trial.wrap(Mlp(), **given), lambda step: trial.data(4, 8, step=step))


@case(4)
def on_halves_of_the_ranks(trial: Trial) -> None:
    """Two groups of two: replicas agree within each."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = trial.wrap(Mlp(), process_group=halves[trial.rank // 2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        square(model(trial.data(4, 8, step=step))).backward()
        observe(trial, f"step {step}", model, alike=False)
        optimizer.step()


@case(4)
def on_a_group_without_rank_0(trial: Trial) -> None:
    """Rank 0 of the group, not of the world, is whose state counts."""
    group = dist.new_group([3, 1])
    if trial.rank in (1, 3):
        model = trial.wrap(Buffered(), process_group=group)
        square(model(trial.data(4, 4))).backward()
        observe(trial, "after", model, alike=False)
        buffers(trial, "after", model)


@case(2, plain=({},), unused=({"find_unused_parameters": True},), view=({"gradient_as_bucket_view": True},))
def ignored_parameters_and_buffers(trial: Trial, given: dict[str, Any]) -> None:
    module = Buffered()
    trial.DDP._set_params_and_buffers_to_ignore_for_model(module, ["layer.bias", "total"])
    torch.manual_seed(trial.rank)
    module.layer.bias.data.fill_(trial.rank)
    model = trial.wrap(module, **given)
    trial.note("to ignore", sorted(model.parameters_to_ignore))
    for step in range(3):
        model.zero_grad()
        square(model(trial.data(4, 4, step=step))).backward()
        observe(trial, f"step {step}", model, alike=False)
        buffers(trial, f"step {step}", model)


@case()
def is_a_module_like_torchs(trial: Trial) -> None:
    inner = SometimesUnused()
    model = trial.wrap(inner)
    trial.note("instance of torch's", isinstance(model, torch.nn.parallel.DistributedDataParallel))
    trial.note("a plain module is not", isinstance(inner, torch.nn.parallel.DistributedDataParallel))
    trial.note("module", model.module is inner)
    trial.note("named modules", [name for name, _ in model.named_modules()])
    trial.note("named parameters", [name for name, _ in model.named_parameters()])
    trial.note("training", [model.training, model.eval().training, inner.training])
    trial.note("eval is itself", model.train() is model)
    trial.note("join device", str(model.join_device))
    trial.note("join group", model.join_process_group is dist.group.WORLD)
    trial.note("class name", type(model).__name__)


ATTRIBUTES = [
    *("broadcast_bucket_size", "bucket_bytes_cap", "device", "device_ids", "device_type", "dim"),
    *("find_unused_parameters", "gradient_as_bucket_view", "is_multi_device_module", "mixed_precision"),
    *("output_device", "require_backward_grad_sync", "require_forward_param_sync", "static_graph"),
    *("parameters_to_ignore", "bucket_bytes_cap_default", "will_sync_module_buffers"),
]


@case(
    plain=({},),
    other=({"bucket_cap_mb": 3, "find_unused_parameters": True},),
    static=({"static_graph": True},),
)
def attributes_people_read(trial: Trial, given: dict[str, Any]) -> None:
    model = trial.wrap(Mlp(), **given)
    for name in ATTRIBUTES:
        value = getattr(model, name, "missing")
        trial.note(name, value() if callable(value) else str(value))


@case()
def logging_data(trial: Trial) -> None:
    model = trial.wrap(Mlp())
    for step in range(3):
        square(model(trial.data(4, 8, step=step))).backward()
    seen = model._get_ddp_logging_data()
    for key in ("world_size", "rank", "module_name", "backend_name", "find_unused_parameters", "iteration"):
        trial.note(key, seen.get(key))
    for key in ("total_parameter_size_bytes", "num_parameter_tensors", "dtypes", "has_error", "static_graph"):
        trial.note(key, seen.get(key))
    for key in ("gradient_as_bucket_view", "bucket_cap_bytes", "broadcast_buffers", "forward_sync_buffers"):
        trial.note(key, seen.get(key))
    trial.note("buckets", str(seen.get("bucket_sizes")))
