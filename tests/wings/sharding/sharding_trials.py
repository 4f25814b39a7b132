"""What ranks do in the tests of sharded optimizers and of periodic averaging."""

import copy

import torch
import torch.distributed as dist
from torch import nn

from ddp import DistributedDataParallel, ShardedOptimizer

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01}),
    "fused_adamw": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
}
SMALL_BUCKETS_MB = 0.004


class Net(nn.Module):
    """Of odd sizes, with a number, another layout, and something frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(11)
        self.convolution = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.frozen = nn.Linear(45, 45).requires_grad_(False)
        self.first = nn.Linear(45, 31)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(31, 7, bias=False)
        self.spare = nn.Linear(3, 3)  # used when asked for

    def forward(self, x, spare=False):
        x = self.frozen(self.convolution(x).flatten(1)).relu()
        x = self.last(self.first(x).tanh() * self.scale)
        return x[:, :3] + self.spare(x[:, :3]) if spare else x


def batch(step, rank, dtype=torch.float32):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 3, 5, 5, generator=source).to(dtype)


def wrapped(dtype=torch.float32, **options):
    return DistributedDataParallel(Net().to(dtype), bucket_cap_mb=SMALL_BUCKETS_MB, **options)


def with_groups(model):
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": decayed}, {"params": others, "lr": 0.02, "weight_decay": 0.0}]


def made(model, kind, sharded, groups=True):
    optimizer_class, options = OPTIMIZERS[kind]
    params = with_groups(model) if groups else None
    if sharded:
        return ShardedOptimizer(model, optimizer_class, params, **options)
    return optimizer_class(params or model.parameters(), **options)


def loss_of(model, step, spare=False):
    return model(batch(step, dist.get_rank(), model.module.scale.dtype), spare).square().mean()


def parameters_of(model):
    return [p.detach().clone() for p in model.parameters()]


def largest_difference(some, others):
    return max((a - b).abs().max().item() for a, b in zip(some, others, strict=True))


def same_everywhere(tensors):
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    all_of_them = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, flat)
    return all(torch.equal(flat, other) for other in all_of_them)


def clip(model, optimizer, max_norm, norm_type):
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.clip_grad_norm_(max_norm, norm_type)
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)


# --- trials ----------------------------------------------------------------------------------------


def trained(kind, sharded, dtype, accumulate, clipped, as_views):
    model = wrapped(dtype, gradient_as_bucket_view=as_views, find_unused_parameters=True)
    optimizer = made(model, kind, sharded)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    norms = []
    for step in range(5):
        optimizer.zero_grad()
        if accumulate:
            with model.no_sync():
                loss_of(model, step + 50).backward()
            loss_of(model, step + 80).backward()
        loss_of(model, step, spare=step == 3).backward()
        if clipped:
            norms.append(clip(model, optimizer, 0.3, clipped).item())
        optimizer.step()
        scheduler.step()
    return parameters_of(model), norms


def like_the_whole_one(kind, dtype=torch.float32, accumulate=False, clipped=None, as_views=False):
    """-> the largest difference of parameters, of norms, and whether the replicas are the same"""
    arguments = (dtype, accumulate, clipped, as_views)
    ours, our_norms = trained(kind, True, *arguments)
    whole, norms = trained(kind, False, *arguments)
    apart = max((abs(a - b) for a, b in zip(our_norms, norms, strict=True)), default=0.0)
    return largest_difference(ours, whole), apart, same_everywhere(ours)


def large_half_precision_gradients():
    """-> this rank's shard of the averages, and what our DDP has there."""
    found = []
    for sharded in (True, False):
        torch.manual_seed(3)
        model = DistributedDataParallel(nn.Linear(8, 8, bias=False, dtype=torch.float16))
        optimizer = ShardedOptimizer(model, torch.optim.SGD, lr=0.0) if sharded else None
        model(torch.full((1, 8), 60_000.0, dtype=torch.float16)).sum().backward()
        if optimizer is not None:
            own = [piece.grad for group in optimizer.param_groups for piece in group["params"]]
        else:
            own = [model.module.weight.grad.flatten()[: len(found[0])]]
        found.append(torch.cat(own).tolist())
    return found


def steps(model, optimizer, numbers):
    for step in numbers:
        optimizer.zero_grad()
        loss_of(model, step, spare=True).backward()
        optimizer.step()


class Remembers(torch.optim.Optimizer):
    """Steps by the change of the gradient, and keeps the last one as it is, not a copy."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            before = self.state[p].get("before", torch.zeros_like(p))
            p.sub_(2 * p.grad - before, alpha=0.05)
            self.state[p]["before"] = p.grad


def kept_gradients(again=False):
    """-> the difference to the unsharded optimizer. `again`: backwards accumulate."""
    results = []
    for sharded in (False, True):
        model = wrapped()
        whole = None if sharded else Remembers(model.parameters())
        optimizer = whole or ShardedOptimizer(model, Remembers, elementwise=True)
        for step in range(5):
            optimizer.zero_grad()
            for i in range(1 + again):
                loss_of(model, 10 * step + i, spare=True).backward()
            optimizer.step()
        results.append(parameters_of(model))
    return largest_difference(*results)


def whole_state_of(model, optimizer):
    """On all ranks."""
    optimizer.consolidate_state_dict(to=1)
    told = [optimizer.state_dict() if dist.get_rank() == 1 else None]
    dist.broadcast_object_list(told, src=1)
    return {"model": model.module.state_dict(), "optimizer": told[0]}


def there_and_back(kind):
    """Sharded, then whole, then sharded again, each from the state of the one before. -> difference to whole only"""
    plain = wrapped()
    alone = made(plain, kind, False)
    steps(plain, alone, range(6))

    model = wrapped()
    optimizer = made(model, kind, True)
    steps(model, optimizer, range(2))
    saved = whole_state_of(model, optimizer)

    second = wrapped()
    second.module.load_state_dict(saved["model"])
    whole = made(second, kind, False)
    whole.load_state_dict(saved["optimizer"])
    steps(second, whole, range(2, 4))

    third = wrapped()
    third.module.load_state_dict(second.module.state_dict())
    last = made(third, kind, True)
    last.load_state_dict(whole.state_dict())
    steps(third, last, range(4, 6))
    shapes = [
        all(value.shape in (p.shape, ()) for value in saved["optimizer"]["state"][i].values())
        for i, p in enumerate(p for group in with_groups(model) for p in group["params"])
        if i in saved["optimizer"]["state"]
    ]
    return largest_difference(parameters_of(plain), parameters_of(third)), all(shapes)


def saved_here(kind):
    model = wrapped()
    optimizer = made(model, kind, True)
    steps(model, optimizer, range(3))
    return whole_state_of(model, optimizer)


def loaded_here(kind, saved):
    """In a world of another size: the next step on data that all ranks share is what the whole optimizer does."""
    saved = copy.deepcopy(saved)  # it came in memory that the ranks have in common
    dist.barrier()
    results = []
    for sharded in (True, False):
        model = wrapped()
        model.module.load_state_dict(saved["model"])
        optimizer = made(model, kind, sharded)
        optimizer.load_state_dict(saved["optimizer"])
        steps(model, optimizer, range(2))
        results.append(parameters_of(model))
    return largest_difference(*results)


def memory(kind):
    """-> elements of state on this rank, and of all parameters"""
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 50)), bucket_cap_mb=0.02
    )
    optimizer = made(model, kind, True, groups=False)
    model(torch.randn(2, 100)).sum().backward()
    optimizer.step()
    held = sum(
        value.numel()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.ndim
    )
    return held, sum(p.numel() for p in model.parameters())


def without_a_copy():
    """DDP's buckets leave room behind them, so that the reduce-scatter takes them as they are."""
    model = wrapped()
    optimizer = made(model, "sgd", True)
    steps(model, optimizer, range(3))
    flats = [bucket.flat for bucket in model.reducer.core.sender.buckets]
    return [
        bucket._pad(flat).data_ptr() == flat.data_ptr()
        for bucket, flat in zip(optimizer.buckets, flats, strict=True)
    ]


def an_observed_order():
    """Made after a backward, the optimizer takes the buckets in the order in which gradients arrived."""

    class Swapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.b, self.a = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            return self.b(self.a(x))

    model = DistributedDataParallel(Swapped(), bucket_cap_mb=0.0001)
    for _ in range(2):
        model(torch.randn(2, 6)).sum().backward()
    model.zero_grad()
    optimizer = made(model, "sgd", True, groups=False)
    for _step in range(3):
        model(torch.randn(2, 6)).sum().backward()
        optimizer.step()
    names = model.reducer.core.names
    return [names[i] for bucket in model.reducer.core.sender.plan.buckets for i in bucket.members]


def uneven_inputs():
    """Rank 0 has more to do. -> whether the replicas are the same, and what the parameters are"""
    from torch.distributed.algorithms import Join

    results = []
    for sharded in (True, False):
        model = wrapped()
        optimizer = made(model, "adam", sharded)
        joined = [model, optimizer] if sharded else [model]
        with Join(joined):
            for step in range(5 - 2 * dist.get_rank()):
                optimizer.zero_grad()
                loss_of(model, step, spare=True).backward()
                optimizer.step()
        results.append(parameters_of(model))
    return same_everywhere(results[0]), largest_difference(*results)


def torchs_zero():
    """torch's own sharding of states, under our class."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    results = []
    for sharded in (True, False):
        model = wrapped()
        optimizer_class, options = OPTIMIZERS["adam"]
        trained_ones = [p for p in model.parameters() if p.requires_grad]
        optimizer = (
            ZeroRedundancyOptimizer(trained_ones, optimizer_class, **options)
            if sharded
            else optimizer_class(trained_ones, **options)
        )
        steps(model, optimizer, range(4))
        results.append(parameters_of(model))
    return largest_difference(*results)


def misuse(how):
    model = wrapped()
    if how == "plain module":
        ShardedOptimizer(model.module, torch.optim.SGD, lr=0.1)
    elif how == "left out":
        ShardedOptimizer(model, torch.optim.SGD, list(model.module.first.parameters()), lr=0.1)
    elif how == "not elementwise":
        ShardedOptimizer(model, torch.optim.LBFGS)
    elif how == "sparse":
        sparse = DistributedDataParallel(nn.Embedding(5, 3, sparse=True))
        ShardedOptimizer(sparse, torch.optim.SGD, lr=0.1)
    elif how == "twice":
        made(model, "sgd", True)
        made(model, "sgd", True)
    optimizer = made(model, "sgd", True)
    if how == "state of all":
        optimizer.state_dict()
    elif how == "one more group":
        optimizer.add_param_group({"params": [torch.zeros(3, requires_grad=True)]})
    elif how == "no_sync only":
        with model.no_sync():
            loss_of(model, 0).backward()
        optimizer.step()
    elif how == "moved":
        model.module.first.weight.data = model.module.first.weight.data.clone()
        loss_of(model, 0, spare=True).backward()
        optimizer.step()
    elif how == "other groups":
        optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]})


def overlap():
    """When the first layer's gradient comes, the last, the buckets of later layers are on their way already."""
    model = wrapped()
    optimizer = made(model, "sgd", True)
    under_way = []
    model.module.convolution.weight.register_post_accumulate_grad_hook(
        lambda _p: under_way.append([bucket._work is not None for bucket in optimizer.buckets])
    )
    steps(model, optimizer, range(3))
    return under_way


def scaled(overflow):
    """With torch's scaler for shards: an overflow on one rank skips the step on all. -> whether it was skipped"""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    model = wrapped()
    optimizer = made(model, "sgd", True)
    scaler = ShardedGradScaler(device="cpu", init_scale=4.0, process_group=dist.group.WORLD)
    before = parameters_of(model)
    loss = loss_of(model, 0, spare=True)
    if overflow and dist.get_rank() == 0:
        loss = loss * torch.tensor(float("inf"))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    skipped = largest_difference(before, parameters_of(model)) == 0.0
    # The next step is none the worse for it.
    scaler.scale(loss_of(model, 1, spare=True)).backward()
    scaler.step(optimizer)
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    return skipped, finite, largest_difference(before, parameters_of(model)) > 0, same_everywhere(before)
