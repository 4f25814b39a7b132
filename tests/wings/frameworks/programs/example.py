"""Runs an example, and prints its weights. Rank 1 of the first generation dies after as many steps as PLAN says."""

import hashlib
import json
import os
import runpy
import signal
import sys

from torch.optim.optimizer import register_optimizer_step_post_hook

PLAN = json.loads(os.environ["PLAN"])
_steps, _optimizer = 0, None


def _stepped(optimizer, *_):
    global _steps, _optimizer
    _steps, _optimizer = _steps + 1, optimizer
    if _steps == PLAN.get("dies_after") and (os.environ["RANK"], os.environ["DDP_GENERATION"]) == ("1", "1"):
        os.kill(os.getpid(), signal.SIGKILL)


register_optimizer_step_post_hook(_stepped)
sys.argv = [PLAN["example"]]
runpy.run_path(PLAN["example"], run_name="__main__")
weights = hashlib.sha256()
for group in _optimizer.param_groups:
    for each in group["params"]:
        weights.update(each.detach().cpu().numpy().tobytes())
print(f"weights {os.environ['RANK']} {weights.hexdigest()}")
