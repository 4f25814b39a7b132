"""What the programs have in common: a plan that kills ranks, and lines that a test reads.

PLAN: {"die": {generation: {"rank", "step", "after_s"}}, "stop_at": step, ...}. Or a rank dies at one point of a batch:
{"at": {generation: {"rank", "batch", "where", "holds"}}}, with the number of the batch in this generation. If it holds,
the others wait at this point until the launcher stops them.
"""

import hashlib
import json
import os
import signal
import threading
import time

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import TensorDataset

PLAN, GENERATION = json.loads(os.environ["PLAN"]), os.environ.get("DDP_GENERATION", "1")
THERE, RANK = PLAN.get("there") or os.environ["THERE"], int(os.environ["RANK"])


def say(**line):
    with open(f"{THERE}/said-{RANK}", "a") as file:
        file.write(json.dumps({"generation": int(GENERATION), "rank": RANK} | line) + "\n")


def begin_step(step):
    """Call it at the beginning of step 0, 1, ..."""
    mine = PLAN.get("die", {}).get(GENERATION, {})
    if mine.get("rank") == RANK and mine["step"] == step:
        if not mine["after_s"]:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Timer(mine["after_s"], os.kill, (os.getpid(), signal.SIGKILL)).start()
    if step == PLAN.get("stop_at"):
        say(what="waits")
        while not os.path.exists(f"{THERE}/go-on"):
            time.sleep(0.01)


_batches, _is_now, _stopped = 0, False, None


def begin_batch():
    """Call it at the beginning of each batch, also of those whose gradients are added up."""
    global _batches, _is_now
    mine = PLAN.get("at", {}).get(GENERATION, {})
    _is_now = mine.get("batch") == _batches
    _batches += 1
    _here("begin")


def _here(where):
    global _is_now
    if not _is_now or PLAN["at"][GENERATION]["where"] != where:
        return
    mine, _is_now = PLAN["at"][GENERATION], False
    if mine["rank"] == RANK:
        os.kill(os.getpid(), signal.SIGKILL)
    if mine["holds"]:
        while os.read(_stopped, 1) != bytes([signal.SIGTERM]):
            pass


def has_points(model):
    """Let a rank die at the points of this model, too: "forward", "backward", and around the optimizer."""
    global _stopped
    _stopped, end = os.pipe()
    os.set_blocking(end, False)
    signal.set_wakeup_fd(end, warn_on_full_buffer=False)
    model.register_forward_pre_hook(lambda *_: _here("forward"))
    list(model.parameters())[-1].register_hook(lambda _: _here("backward"))
    register_optimizer_step_pre_hook(lambda *_: _here("optimizer"))
    register_optimizer_step_post_hook(lambda *_: _here("stepped"))
    return model


def end(model):
    weights = b"".join(each.detach().cpu().numpy().tobytes() for each in model.parameters())
    say(what="ends", digest=hashlib.sha256(weights).hexdigest())


def net():
    return has_points(
        nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
    )


def data(count=96):
    inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(3))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))
