"""What ranks do in the tests of periodic averaging: beside each policy, the loop that somebody would write by hand."""

import copy

import torch
import torch.distributed as dist
from torch import nn

from ddp import DistributedDataParallel
from ddp.averaging import DiLoCo, LocalSGD

CLASSES = {"ours": DistributedDataParallel, "torch": nn.parallel.DistributedDataParallel, "none": lambda m: m}


def parameters_of(model):
    return [p.detach().clone() for p in model.parameters()]


def largest_difference(some, others):
    return max((a - b).abs().max().item() for a, b in zip(some, others, strict=True))


def same_everywhere(tensors):
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    all_of_them = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, flat)
    return all(torch.equal(flat, other) for other in all_of_them)


def network():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 3))


def batch(step, rank):
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 6, generator=source)


def inner(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def outer(parameters):
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def one_step(model, optimizer, step):
    optimizer.zero_grad()
    model(batch(step, dist.get_rank())).square().mean().backward()
    optimizer.step()


def everywhere(model):
    """Each rank's parameters and buffers of floating point, averaged by the plainest of means."""
    for tensor in [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]:
        tensor.data /= dist.get_world_size()
        dist.all_reduce(tensor.data)


def by_hand(steps, every, warmup, which, outer_steps):
    model = CLASSES[which](network())
    optimizer = inner(model)
    for step in range(warmup):
        one_step(model, optimizer, step)
    alone = model.module if which != "none" else model  # its gradients are nobody's business
    for buffer in alone.buffers() if warmup else ():
        dist.broadcast(buffer, src=0)  # what DDP does in the first forward after a step that was synchronized
    anchors = [p.detach().clone() for p in alone.parameters()]
    meta = outer(anchors)
    for step in range(warmup, steps):
        one_step_alone(alone, optimizer, step)
        if (step + 1 - warmup) % every == 0:
            everywhere(alone)
            if outer_steps:
                for anchor, p in zip(anchors, alone.parameters(), strict=True):
                    anchor.grad = anchor - p.detach()
                meta.step()
                for anchor, p in zip(anchors, alone.parameters(), strict=True):
                    p.data.copy_(anchor)
    return alone


def one_step_alone(module, optimizer, step):
    optimizer.zero_grad()
    losses = module(batch(step, dist.get_rank())).square().mean()
    gradients = torch.autograd.grad(losses, list(module.parameters()))
    for p, gradient in zip(module.parameters(), gradients, strict=True):
        p.grad = gradient
    optimizer.step()


def made(kind, model, every, warmup):
    if kind == "diloco":
        return DiLoCo(model, outer, every=every, warmup=warmup)
    return LocalSGD(model, every=every, warmup=warmup)


def like_the_loop(kind, which, steps=11, every=3, warmup=2):
    model = CLASSES[which](network())
    optimizer = inner(model)
    policy = made(kind, model, every, warmup)
    alike = []
    for step in range(steps):
        with policy.step():
            one_step(model, optimizer, step)
        alike.append(same_everywhere(parameters_of(model)))
    wanted = by_hand(steps, every, warmup, which, kind == "diloco")
    buffers = [b for b in model.buffers() if b.is_floating_point()]
    wanted_buffers = [b for b in wanted.buffers() if b.is_floating_point()]
    return (
        largest_difference(parameters_of(model), parameters_of(wanted)),
        largest_difference(buffers, wanted_buffers),
        alike,
    )


def goes_on_as_before(kind):
    model = DistributedDataParallel(network())
    optimizer = inner(model)
    policy = made(kind, model, 3, 1)
    for step in range(6):  # in the middle between two meetings: each rank saves its own
        with policy.step():
            one_step(model, optimizer, step)
    saved = copy.deepcopy(
        (model.module.state_dict(), optimizer.state_dict(), policy.state_dict(), model.state_dict())
    )
    for step in range(6, 12):
        with policy.step():
            one_step(model, optimizer, step)
    again = network()
    again = DistributedDataParallel(again)
    second = inner(again)
    other = made(kind, again, 3, 1)
    again.module.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    other.load_state_dict(saved[2])
    for step in range(6, 12):
        with other.step():
            one_step(again, second, step)
    return other.steps, largest_difference(parameters_of(model), parameters_of(again))


def now(kind):
    """`meet()` by itself; a step that raises is not counted."""
    model = DistributedDataParallel(network())
    optimizer = inner(model)
    policy = made(kind, model, 100, 0)
    for step in range(3):
        with policy.step():
            one_step(model, optimizer, step)
    before = same_everywhere(parameters_of(model))
    policy.synchronize()
    after = same_everywhere(parameters_of(model))
    try:
        with policy.step():
            raise KeyError
    except KeyError:
        return before, after, policy.steps


def of_another_model():
    policy = DiLoCo(DistributedDataParallel(network()), outer, every=2)
    DiLoCo(nn.Linear(3, 3), outer, every=2).load_state_dict(policy.state_dict())
