"""What the status page costs: a write, beside a call that does nothing; and all that a training step writes.

    python bench/status_page.py [--rounds 5] [--blocks 20] [--calls 100000] [--write-docs [FILE]]

A write is timed in a loop, the loop itself taken off. The step is that of an MLP of a million parameters under torch's
own DistributedDataParallel, on two ranks over Gloo. Both ways run in the same processes, in blocks of steps that
alternate: with the marks on torch's functions, and with the functions as torch has them.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)  # beside this file lies a ddp.py, which is not the package

from ddp.telemetry import status_page  # noqa: E402
from launcher.health.pages import Pages  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_STEPS = 30


# --- one write ---------------------------------------------------------------------------------------


def _ns(call: Callable[[], object], calls: int) -> float:
    best = float("inf")
    for _ in range(7):
        begin = time.perf_counter_ns()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter_ns() - begin) / calls)
    return best


def _writes(page: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    group = page.group("0", 2, "0-1")
    yield "a phase", lambda: page.phase(status_page.BACKWARD)
    yield "a bucket", lambda: page.buckets(7, 3, 2)
    yield "a collective entered", lambda: page.enter(group, "all_reduce", "float32", 1 << 20, 77, -1, 0, 0)

    def step() -> None:
        page.phase(status_page.FORWARD)
        page.step()

    yield "a phase and a step", step


def writes_table(calls: int) -> str:
    nothing = _ns(lambda: None, calls)
    pages = Pages()
    os.environ |= pages.open(0, 0)
    rows = [f"| a call that does nothing | {nothing:.0f} ns |"]
    rows += [
        f"| {name} | {_ns(call, calls) - nothing:.0f} ns |" for name, call in _writes(status_page.page())
    ]
    pages.close_all()
    return "\n".join(["| one write | time |\n|---|---:|", *rows])


# --- all that a step writes --------------------------------------------------------------------------


def step_ratios(rounds: int, blocks: int) -> list[float]:
    """Of step times, with the marks over without them; one for each pair of blocks on rank 0."""
    ratios: list[float] = []
    for _ in range(rounds):
        pages = Pages()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        ranks = []
        for rank in range(2):
            env = dict(os.environ) | pages.open(rank, rank) | {"RANK": str(rank), "WORLD_SIZE": "2"}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, os.path.abspath(__file__), "--rank", "--blocks", str(blocks)]
            ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
        pages.close_all()
        ratios += json.loads(said[0])
    return ratios


def rank(blocks: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from ddp.telemetry import torch_marks

    ways = [_functions(), (torch_marks.install(), _functions())[1]]
    dist.init_process_group("gloo")
    layers = (torch.nn.Linear(512, 512) for _ in range(4))
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(32, 512)

    def steps() -> float:
        begin = time.perf_counter()
        for _ in range(_STEPS):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        return time.perf_counter() - begin

    times: list[list[float]] = [[], []]
    for block in range(-2, blocks):
        for way in (0, 1) if block % 2 else (1, 0):
            _use(ways[way])
            took = steps()
            if block >= 0:
                times[way].append(took)
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps([b / a for a, b in zip(*times, strict=True)]))
    dist.destroy_process_group()


def _functions() -> list[tuple[Any, str, Any]]:
    """All that the marks replace, as it is now."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import optimizer

    from ddp.telemetry.collective_marks import FACTS

    places: list[tuple[Any, str]] = [(torch.autograd, "_engine_run_backward"), (dist.Work, "wait")]
    places += [(DistributedDataParallel, "_pre_forward"), (DistributedDataParallel, "_post_forward")]
    places += [(dist.ProcessGroup, name) for name in FACTS if hasattr(dist.ProcessGroup, name)]
    found = [(owner, name, getattr(owner, name)) for owner, name in places]
    hooks = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    return [*found, *((optimizer, name, getattr(optimizer, name).copy()) for name in hooks)]


def _use(functions: list[tuple[Any, str, Any]]) -> None:
    for owner, name, function in functions:
        setattr(owner, name, function)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=20, help="of steps, in each round")
    parser.add_argument("--calls", type=int, default=100_000, help="of each kind of write")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    page = os.path.join(ROOT, "docs", "status-page.md")
    parser.add_argument("--write-docs", metavar="FILE", nargs="?", const=page)
    options = parser.parse_args()
    if options.rank:
        return rank(options.blocks)
    table = writes_table(options.calls)
    ratios = sorted(step_ratios(options.rounds, options.blocks))
    tenth = len(ratios) // 10
    step = (
        f"Step time of the MLP with all writes, divided by the time without: {statistics.median(ratios):.4f} "
        f"(median of {len(ratios)} pairs of blocks; nine of ten below {ratios[-tenth - 1]:.3f})."
    )
    text = f"{table}\n\n{step}"
    print(text)
    if options.write_docs:
        from shown import write_between_markers

        write_between_markers(options.write_docs, "status-page", text)


if __name__ == "__main__":
    main()
