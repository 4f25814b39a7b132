"""A loop of a user's own, with a function that saves: a plan kills ranks at instants of their steps, once a generation.

PLAN: {"steps": ..., "world": "torch" or "ours", "die": {generation: {"rank", "step", "when"}}, "save": ...}. `when`:
backward, stepping (in the optimizer), between (after it, before the counter), hang, or seconds after the step began.
A rank that dies at or after its optimizer first waits until the others have finished theirs. They would otherwise be
interrupted before it or after it, by chance.
"""

import hashlib
import json
import os
import signal
import threading
import time

import torch
import torch.distributed as dist
from torch import nn

import ddp

PLAN, GENERATION = json.loads(os.environ["PLAN"]), os.environ["DDP_GENERATION"]
THERE = PLAN.get("there") or os.environ["THERE"]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
net = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4))
wrapper = ddp.DistributedDataParallel if PLAN.get("model") == "ours" else nn.parallel.DistributedDataParallel
model = wrapper(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
kept = {"model": net, "optimizer": optimizer, "scheduler": scheduler}
step = 0


def say(**line):
    with open(f"{THERE}/said-{rank}", "a") as file:
        file.write(json.dumps({"generation": int(GENERATION), "rank": rank} | line) + "\n")


if path := ddp.resume_path():
    found = torch.load(path, weights_only=True)
    for name, each in kept.items():
        each.load_state_dict(found[name])
    step = found["step"]
    torch.set_rng_state(found["random"])
say(what="begins", step=step, path=path, pid=os.getpid())


@ddp.on_failure(limit_s=PLAN.get("limit_s", 25.0))
def save(reason):
    say(what="saves", step=step, reason=reason)
    if PLAN.get("save") == "raises":
        raise ValueError("the disk is full")
    path = f"{THERE}/saved-{GENERATION}.pt"
    with open(path, "wb") as file:
        if PLAN.get("save") == "hangs":
            file.write(b"half")
            file.flush()
            time.sleep(600)
        state = {name: each.state_dict() for name, each in kept.items()}
        torch.save(state | {"step": step, "random": torch.get_rng_state()}, file)
    return None if PLAN.get("save") == "says nothing" else path


def die():
    os.kill(os.getpid(), signal.SIGKILL)


planned = PLAN.get("die", {}).get(GENERATION, {})
mine = planned if planned.get("rank") == rank else {}
stepped = f"{THERE}/stepped-{GENERATION}"


def at(when):
    if mine.get("step") == step and mine["when"] == when:
        while when != "backward" and not os.path.exists(stepped):
            time.sleep(0.01)
        die()


def finished_optimizer():
    if planned.get("step") == step and not mine:
        open(stepped, "w").close()


def later():
    if mine.get("step") == step and isinstance(mine["when"], float):
        threading.Timer(mine["when"], die).start()
    if mine.get("step") == step and mine["when"] == "hang":
        time.sleep(600)


optimizer.register_step_pre_hook(lambda *_: at("stepping"))
net[0].weight.register_hook(lambda _grad: at("backward"))
while step < PLAN["steps"]:
    later()
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + rank))
    if step == PLAN.get("stop_at"):
        say(what="waits")
    while step == PLAN.get("stop_at") and not os.path.exists(f"{THERE}/go-on"):
        time.sleep(0.01)
    optimizer.zero_grad()
    torch.manual_seed(step + 1000 * rank)  # of the dropout: it differs on the ranks

    def closure(inputs=inputs):
        nn.functional.cross_entropy(model(inputs), torch.arange(8) % 4).backward()
        return 0.0

    if PLAN.get("closure"):
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()
    finished_optimizer()
    at("between")
    scheduler.step()
    step += 1
    if PLAN.get("reduces"):
        ddp.step_complete()
        dist.all_reduce(torch.ones(1))
weights = b"".join(each.detach().numpy().tobytes() for each in net.parameters())
say(what="ends", digest=hashlib.sha256(weights).hexdigest(), rate=scheduler.get_last_lr())
dist.destroy_process_group()
