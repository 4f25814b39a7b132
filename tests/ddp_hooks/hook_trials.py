"""What ranks do in the tests of communication hooks. Each function runs on all ranks; both DDP classes are tried."""

import copy
import pickle
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from ddp import DistributedDataParallel, comm_hooks
from ddp.comm_hooks import Gossip, PowerSGD, Quantized, TopK

CLASSES = {"ours": DistributedDataParallel, "torch": nn.parallel.DistributedDataParallel}
# Several buckets, so that several are under way at once.
SMALL_BUCKETS_MB = 0.01

HOOKS = {
    "all_reduce": (lambda: None, comm_hooks.all_reduce),
    "fp16": (lambda: None, comm_hooks.fp16),
    "bf16": (lambda: None, comm_hooks.bf16),
    "power": (lambda: PowerSGD(rank=2, start_step=2), comm_hooks.power_sgd),
    "power_cold": (
        lambda: PowerSGD(rank=4, start_step=1, warm_start=False, error_feedback=False),
        comm_hooks.power_sgd,
    ),
    "quantized": (Quantized, comm_hooks.quantized),
    "quantized_chunks": (lambda: Quantized(chunk=64, error_feedback=True), comm_hooks.quantized),
    "top_k": (lambda: TopK(share=0.1), comm_hooks.top_k),
    "fp16_power": (lambda: PowerSGD(rank=2, start_step=2), comm_hooks.fp16_around(comm_hooks.power_sgd)),
    "bf16_all_reduce": (lambda: None, comm_hooks.bf16_around(comm_hooks.all_reduce)),
    "gossip": (Gossip, comm_hooks.gossip_grad),
    "noop": (lambda: None, comm_hooks.noop),
}


def mlp():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 4))


def batch(step, rank, dtype=torch.float32):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(16, 20, generator=source).to(dtype)


def loss_of(model, x):
    """To learn: a linear map."""
    return (model(x) - x[:, :4] - x[:, 4:8]).square().mean()


def hooked(hook, which="ours", **options):
    make, function = HOOKS[hook]
    state = make()
    model = CLASSES[which](mlp(), bucket_cap_mb=SMALL_BUCKETS_MB, **options)
    model.register_comm_hook(state, function)
    return model, state


def alone(hook, which):
    """-> whether a backward in which the peer does not take part raises."""
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    model = CLASSES[which](mlp(), process_group=group)
    model.register_comm_hook(group, HOOKS[hook][1])
    raised = False
    if dist.get_rank() == 0:
        try:
            loss_of(model, batch(0, 0)).backward()
        except RuntimeError:
            raised = True
    dist.barrier()
    return raised


def backward(model, step):
    model.zero_grad()
    loss_of(model, batch(step, dist.get_rank())).backward()
    return [p.grad.clone() for p in model.parameters()]


def same_everywhere(tensors):
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    all_of_them = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, flat)
    return all(torch.equal(flat, other) for other in all_of_them)


def true_averages(model, step):
    plain = copy.deepcopy(model.module)
    plain.zero_grad()
    size = dist.get_world_size()
    sum(loss_of(plain, batch(step, rank)) / size for rank in range(size)).backward()
    return [p.grad for p in plain.parameters()]


# --- trials ----------------------------------------------------------------------------------------


def learns(hook, which, steps=60):
    """-> the loss before and after, on data nobody trained with, and whether the replicas are the same."""
    model, _ = hooked(hook, which)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    test = torch.cat([batch(9_000, rank) for rank in range(16)])
    before = loss_of(model.module, test).item()
    for step in range(steps):
        backward(model, step % 30)
        optimizer.step()
    after = loss_of(model.module, test).item()
    return before, after, same_everywhere(list(model.parameters()))


def ours_and_torchs(hook):
    """The gradients of some steps under both classes: what the hooks give must not depend on whose buckets they are.

    Where a bucket is compressed as a whole, it does, so there is one bucket."""
    seen = []
    for which in CLASSES:
        make, function = HOOKS[hook]
        model = CLASSES[which](mlp(), bucket_cap_mb=100)
        model.register_comm_hook(make(), function)
        seen.append([backward(model, step) for step in range(4)])
    # Before the order of arrival is known, and after.
    return [
        max((a - b).abs().max().item() for a, b in zip(x, y, strict=True))
        for x, y in zip(*seen, strict=False)
    ]


def distance_from_the_average(hook, steps=4):
    """-> for each step: the largest error, and the largest true average; and whether all ranks have the same."""
    model, _ = hooked(hook)
    found = []
    for step in range(steps):
        wanted = true_averages(model, step)
        got = backward(model, step)
        error = max((a - b).abs().max().item() for a, b in zip(got, wanted, strict=True))
        found.append((error, max(b.abs().max().item() for b in wanted), same_everywhere(got)))
    return found


def full_rank():
    """PowerSGD with as many columns as the matrices have loses nothing."""
    model = DistributedDataParallel(mlp(), bucket_cap_mb=SMALL_BUCKETS_MB)
    model.register_comm_hook(PowerSGD(rank=64, start_step=0, min_compression=0.0), comm_hooks.power_sgd)
    return max(
        (a - b).abs().max().item()
        for step in range(3)
        for a, b in zip(backward(model, step), true_averages(model, step), strict=True)
    )


def all_of_the_elements():
    model = DistributedDataParallel(mlp(), bucket_cap_mb=SMALL_BUCKETS_MB)
    model.register_comm_hook(TopK(share=1.0), comm_hooks.top_k)
    return max(
        (a - b).abs().max().item()
        for step in range(3)
        for a, b in zip(backward(model, step), true_averages(model, step), strict=True)
    )


FEEDBACK = {
    "top_k": (lambda: TopK(share=0.05), comm_hooks.top_k),
    "quantized": (lambda: Quantized(error_feedback=True), comm_hooks.quantized),
    "quantized_chunks": (lambda: Quantized(chunk=32, error_feedback=True), comm_hooks.quantized),
    "power": (lambda: PowerSGD(rank=1, start_step=0), comm_hooks.power_sgd),
}


def nothing_is_lost(hook, which="ours", steps=5):
    """What was handed out, and what the ranks still remember, adds up to the sum of the true averages. The buckets
    are made anew after the first step; what is remembered must go along. -> the difference, and what is remembered"""
    make, function = FEEDBACK[hook]
    state = make()
    model = CLASSES[which](mlp(), bucket_cap_mb=SMALL_BUCKETS_MB)
    model.register_comm_hook(state, function)
    got = [torch.zeros_like(p) for p in model.parameters()]
    wanted = [torch.zeros_like(p) for p in model.parameters()]
    for step in range(steps):
        for total, average in zip(wanted, true_averages(model, step), strict=True):
            total += average
        for total, average in zip(got, backward(model, step), strict=True):
            total += average
    remembered = state.state_dict(model)["errors"]
    difference, kept = 0.0, 0.0
    for (name, _), handed_out, due in zip(model.module.named_parameters(), got, wanted, strict=True):
        open_ = remembered.get(name, torch.zeros(due.numel())).clone()
        dist.all_reduce(open_)
        open_ /= dist.get_world_size()
        kept = max(kept, open_.abs().max().item())
        difference = max(difference, (handed_out + open_.view_as(due) - due).abs().max().item())
    return difference, kept


def goes_on_as_before(hook):
    """Saved after some steps and loaded into a new state: the steps that follow are the same, to the bit."""
    model, state = hooked(hook)
    for step in range(4):
        backward(model, step)
    saved = pickle.loads(pickle.dumps(state.state_dict(model)))
    settings = pickle.loads(pickle.dumps(state))
    wanted = [backward(model, step) for step in range(4, 7)]
    _, function = HOOKS[hook]
    again = DistributedDataParallel(mlp(), bucket_cap_mb=SMALL_BUCKETS_MB)
    again.reducer.core.rebuild(model.reducer.core.agreed_order)  # the buckets that the other has by now
    again.register_comm_hook(settings, function)
    again.reducer.core.rebuild(model.reducer.core.agreed_order)
    settings.load_state_dict(again.module, saved)
    got = [backward(again, step) for step in range(4, 7)]
    return settings.step, all(
        torch.equal(a, b) for x, y in zip(got, wanted, strict=True) for a, b in zip(x, y, strict=False)
    )


def of_another_model(hook):
    model, state = hooked(hook)
    for step in range(3):
        backward(model, step)
    state.load_state_dict(nn.Linear(2, 2), state.state_dict(model))


class Odd(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.first = nn.Linear(20, 4)
        if kind == "complex":
            self.odd = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        else:
            self.odd = nn.Embedding(7, 4, sparse=True)

    def forward(self, x):
        if isinstance(self.odd, nn.Embedding):
            return self.first(x) + self.odd(torch.arange(16) % 7)
        return self.first(x) * self.odd.abs()


def refused(hook, kind, which):
    make, function = HOOKS[hook]
    model = CLASSES[which](Odd(kind))
    model.register_comm_hook(make(), function)
    model(batch(0, 0)).sum().backward()


def overflow_is_seen_and_forgotten(hook):
    """-> whether the step with an infinity shows it on all ranks, and the second step after it is finite again."""
    model, _ = hooked(hook)
    backward(model, 0)
    model.zero_grad()
    scale = float("inf") if dist.get_rank() == 1 else 1.0
    (loss_of(model, batch(1, dist.get_rank())) * scale).backward()
    seen = not all(bool(p.grad.isfinite().all()) for p in model.parameters())
    backward(model, 2)
    healed = all(bool(grad.isfinite().all()) for grad in backward(model, 3))
    return seen, healed


def half_precision(hook):
    """A model in bfloat16. -> the relative distance from the average, and whether all ranks have the same."""
    make, function = HOOKS[hook]
    model = DistributedDataParallel(mlp().to(torch.bfloat16))
    model.register_comm_hook(make(), function)
    worst = 0.0
    for step in range(3):
        plain = copy.deepcopy(model.module)
        size = dist.get_world_size()
        plain.zero_grad()
        sum(loss_of(plain, batch(step, r, torch.bfloat16)) / size for r in range(size)).backward()
        model.zero_grad()
        loss_of(model, batch(step, dist.get_rank(), torch.bfloat16)).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            worst = max(worst, ((p.grad - q.grad).norm() / q.grad.norm()).item())
    return worst, same_everywhere([p.grad for p in model.parameters()])


def gossips():
    """One step of gossip is the mean of my gradients and those of the rank that I hear from."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model, state = hooked("gossip")
    right = []
    for step in range(5):
        _, source = comm_hooks.gossip.partners(state.topology, size, rank, step, 0)
        plain = copy.deepcopy(model.module)
        plain.zero_grad()
        (loss_of(plain, batch(step, rank)) / 2 + loss_of(plain, batch(step, source)) / 2).backward()
        got = backward(model, step)
        right.append(
            all(torch.allclose(a, p.grad, atol=1e-6) for a, p in zip(got, plain.parameters(), strict=True))
        )
    return right, state.step


class LastUnused(nn.Module):
    """Its first layer, whose bucket is the last, is not used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.unused, self.used = nn.Linear(60, 60), nn.Linear(20, 60)

    def forward(self, x):
        return self.used(x)


def every_bucket_comes(hook):
    make, function = HOOKS[hook]
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    model = DistributedDataParallel(LastUnused(), bucket_cap_mb=SMALL_BUCKETS_MB, **options)
    model.register_comm_hook(make(), function)
    for step in range(3):
        model.zero_grad()
        model(batch(step, dist.get_rank())).square().mean().backward()
    grads = [p.grad for p in model.module.used.parameters()]
    return same_everywhere(grads), [p.grad for p in model.module.unused.parameters()] == [None, None]
