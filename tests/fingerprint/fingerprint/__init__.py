"""Looks at the interpreter that it is imported in. A script calls it at several moments; see `tests/fingerprint`.

A fingerprint has no numbers of processes, no addresses and no times, so two interpreters that were started the same way
have the same. What must be random is drawn: the test compares whether ranks draw different numbers.
"""

import sys

_AT_BEGIN = sorted(sys.modules)  # before this module imports anything
_DEPTH = sys._getframe(1).f_back is None

import json  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import time  # noqa: E402

from fingerprint import draws, libraries, modules, process, python  # noqa: E402

_MOMENTS = {}
_FOLDER = "FINGERPRINT"
_DEADLINE_S = 60.0
_LEARNS_WITHIN_S = 10.0
_LEARNING_CPU_S = (
    0.3  # what the process that forks ranks uses at least, to import what its ranks have imported
)


def begin():
    """At the first line of a script, before it changes anything."""
    _MOMENTS["begin"] = {
        "modules": dict.fromkeys(_AT_BEGIN, "imported"),
        "process": process.look(),
        "python": python.look(),
    }


def look(moment):
    """After the import of torch."""
    _MOMENTS[moment] = {
        "modules": dict.fromkeys(sys.modules, "imported"),
        "process": process.look(),
        "python": python.look(),
        "libraries": libraries.look(),
        "state": modules.look(),
        "draws": draws.look(),
    }


def train():
    """One step with torch's DDP, which imports torch._dynamo."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    dist.barrier()


def reduce():
    """Collectives only, with an optimizer, which imports torch._dynamo."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.sum().backward()
    dist.all_reduce(parameter.grad)
    optimizer.step()
    dist.barrier()


def end():
    """Write down what was seen. Where a file `fails` lies, the first attempt fails when all ranks have come so far."""
    folder, attempt, rank = os.environ[_FOLDER], os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    stem = os.path.join(folder, attempt)
    with open(f"{stem}.{rank}.part", "w") as file:
        json.dump(_MOMENTS, file)
    os.rename(f"{stem}.{rank}.part", f"{stem}.{rank}.json")
    if attempt != "0" or not os.path.exists(os.path.join(folder, "fails")):
        return
    if rank != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the script may have a handler that does not end it
        time.sleep(_DEADLINE_S)  # until rank 0 has failed
    _wait(lambda: os.path.exists(f"{stem}.1.json"))
    if "torch._dynamo" in sys.modules:  # the process that forks ranks imports it too
        used_s = _cpu_s_of_parent()
        _wait(lambda: _cpu_s_of_parent() > used_s + _LEARNING_CPU_S, at_most_s=_LEARNS_WITHIN_S)
    os._exit(3)


def _wait(is_so, at_most_s=_DEADLINE_S):
    give_up_at = time.monotonic() + at_most_s
    while not is_so() and time.monotonic() < give_up_at:
        time.sleep(0.05)


def _cpu_s_of_parent():
    with open(f"/proc/{os.getppid()}/stat") as file:
        ticks = [int(each) for each in file.read().rpartition(")")[2].split()[11:13]]
    return sum(ticks) / os.sysconf("SC_CLK_TCK")


begin()
