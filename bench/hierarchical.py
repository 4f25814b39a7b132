"""A training step across two hosts: torch's DDP over flat Gloo, ours over Gloo, ours over `hier`.

    python bench/hierarchical.py [--rates 1gbit unlimited] [--models 'MLP, 1M' 'GPT-like, 30M'] [--sizes BYTES ...]
                                 [--rounds 7] [--timeout 300] [--json FILE] [--write-docs [FILE]]

Needs root and `ip` and `tc`: the hosts are two network namespaces of this machine, joined by a cable (veth) whose rate
is limited in both directions. Two ranks on each host train in turns, in an order that rotates; a ratio is a
contender's time over torch's in the same round, and the figure the median. The second table is the all-reduce alone,
with one and with two ranks per host.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from hosts import DEVICE, UNLIMITED, do, play, why_not
from shown import ROOT, machine, publish

if TYPE_CHECKING:
    from collections.abc import Iterator

_MODELS_FOLDER = os.path.join(ROOT, "bench", "ddp_models")
_CONTENDERS: list[dict[str, Any]] = [
    {"name": "torch, Gloo", "kind": "torch", "backend": "gloo"},
    {"name": "ours, Gloo", "kind": "ours", "backend": "gloo"},
    {"name": "ours, hier", "kind": "ours", "backend": "hier"},
]
_TARGET, _TARGET_RATE = 0.75, "1gbit"
_HOSTS = 2
_AS_RANK = [os.path.abspath(__file__), "--as-rank"]

# name -> seconds, one per round
Taken = dict[str, list[float]]


# --- a rank ------------------------------------------------------------------------------------------


def rank_main(folder: str) -> None:
    sys.path[:0] = [ROOT, _MODELS_FOLDER]
    import torch
    import torch.distributed as dist

    import ddp.shm

    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert ddp.shm.register(), "the compiled core is not there"
    with open(os.path.join(folder, "trial.json")) as file:
        trial = json.load(file)
    store = dist.FileStore(os.path.join(folder, "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    groups = {"gloo": dist.group.WORLD, "hier": dist.new_group(backend="hier")}
    taken = {model: _train(model, groups, trial["rounds"]) for model in trial["models"]}
    taken |= {str(size): _all_reduce(size, groups, trial["rounds"]) for size in trial["sizes"]}
    if rank == 0:
        with open(os.path.join(folder, "taken.json"), "w") as file:
            json.dump(taken, file)
    dist.barrier()
    dist.destroy_process_group()


def _train(model: str, groups: dict[str, Any], rounds: int) -> Taken:
    import torch
    import torch.distributed as dist
    from models import MODELS
    from rank import contender, one_turn, steps_of_a_turn

    torch.manual_seed(1 + dist.get_rank())
    batch = MODELS[model][1]()
    contenders = [contender(asked, model, groups) for asked in _CONTENDERS]
    for one in contenders:
        one_turn(one, batch, 2)
    steps = steps_of_a_turn(contenders[0], batch)
    taken: Taken = {one.name: [] for one in contenders}
    for number in range(rounds):
        turn = number % len(contenders)
        for one in contenders[turn:] + contenders[:turn]:
            taken[one.name].append(one_turn(one, batch, steps)["step"])
    return taken


def _all_reduce(size: int, groups: dict[str, Any], rounds: int) -> Taken:
    import torch
    import torch.distributed as dist

    tensor = torch.zeros(size // 4)
    repeats = max(1, min(50, (2 << 20) // size))
    taken: Taken = {name: [] for name in groups}
    for number in range(-1, rounds):
        for name in sorted(groups, reverse=bool(number % 2)):
            dist.barrier()
            began = time.perf_counter()
            for _ in range(repeats):
                dist.all_reduce(tensor, group=groups[name])
            if number >= 0:
                taken[name].append((time.perf_counter() - began) / repeats)
    return taken


# --- the hosts ---------------------------------------------------------------------------------------


@contextmanager
def cabled(rate: str) -> Iterator[list[str]]:
    """Two namespaces, 10.78.0.1 and 10.78.0.2, whose names are given."""
    names = [f"bench-{os.getpid()}-{number}" for number in range(_HOSTS)]
    with ExitStack() as undo:
        for name in names:
            do("ip", "netns", "add", name)
            undo.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
        one, other = names
        peer = ("peer", "name", DEVICE, "netns", other)
        do("ip", "link", "add", DEVICE, "netns", one, "type", "veth", *peer)
        for number, name in enumerate(names):
            do("ip", "-n", name, "addr", "add", f"10.78.0.{number + 1}/24", "dev", DEVICE)
            for device in (DEVICE, "lo"):
                do("ip", "-n", name, "link", "set", device, "up")
            if rate != UNLIMITED:
                bucket = ("rate", rate, "burst", "128k", "latency", "20ms")
                do("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", DEVICE, "root", "tbf", *bucket)
        yield names


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for rate in options.rates:
        with cabled(rate) as hosts:
            for ranks_each in (2, 1):
                models = options.models if ranks_each == 2 else []
                trial = {"models": models, "sizes": options.sizes, "rounds": options.rounds}
                taken: dict[str, Taken] = play(hosts, ranks_each, _AS_RANK, trial, options.timeout)
                found += [
                    {"rate": rate, "ranks_each": ranks_each, "what": what, "taken": one}
                    for what, one in taken.items()
                ]
    return found


# --- what is shown -----------------------------------------------------------------------------------


def text_of(found: list[dict[str, Any]], models: list[str]) -> str:
    steps = [
        "| link | model, 2 x 2 ranks | torch DDP, Gloo | ours, Gloo | ratio | ours, hier | ratio | target | |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    alone = [
        "| link | ranks per host | all-reduce of | Gloo | hier | times faster |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for one in found:
        taken = one["taken"]
        if one["what"] in models:
            theirs, gloo, hier = (contender["name"] for contender in _CONTENDERS)
            ratio = _ratio(taken, hier, theirs)
            cells = [_ms(taken[theirs]), _ms(taken[gloo]), f"{_ratio(taken, gloo, theirs):.2f}"]
            cells += [_ms(taken[hier]), f"{ratio:.2f}", *_verdict(one["rate"], ratio)]
            steps.append(f"| {one['rate']} | {one['what']} | {' | '.join(cells)} |")
        else:
            cells = [f"{int(one['what']):,} B", _ms(taken["gloo"]), _ms(taken["hier"])]
            cells.append(f"{_ratio(taken, 'gloo', 'hier'):.2f}")
            alone.append(f"| {one['rate']} | {one['ranks_each']} | {' | '.join(cells)} |")
    return "\n".join(steps) + "\n\n" + "\n".join(alone)


def _verdict(rate: str, ratio: float) -> tuple[str, str]:
    if rate != _TARGET_RATE:
        return "", ""
    return f"<= {_TARGET:g}", "met" if ratio <= _TARGET else "not met"


def _ratio(taken: Taken, ours: str, theirs: str) -> float:
    return statistics.median(a / b for a, b in zip(taken[ours], taken[theirs], strict=True))


def _ms(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.3g} ms"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", nargs="+", default=["1gbit", "unlimited"], help="as tc writes them")
    parser.add_argument("--models", nargs="*", default=["MLP, 1M", "GPT-like, 30M"])
    parser.add_argument(
        "--sizes", type=int, nargs="*", default=[1 << 10, 1 << 16, 1 << 20, 25 << 20, 1 << 26]
    )
    parser.add_argument("--rounds", type=int, default=7, help="default 7")
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="seconds for one set of ranks (default 300)"
    )
    parser.add_argument("--json", metavar="FILE", help="write every figure of every round there")
    parser.add_argument(
        "--write-docs",
        metavar="FILE",
        nargs="?",
        const=os.path.join(ROOT, "docs", "performance.md"),
        help="put the tables between their markers in this file (default: docs/performance.md)",
    )
    parser.add_argument("--as-rank", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        rank_main(options.as_rank)
        return
    if problem := why_not():
        print(f"skipped: {problem}")
        return
    # Also who is told to end takes the ranks and the namespaces down.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    machine_line = machine()
    found = measure(options)
    notes = f"Rounds: {options.rounds}. Machine: {machine_line}."
    text = f"{text_of(found, options.models)}\n\n{notes}"
    publish("hierarchical", text, {"machine": machine_line, "tables": found}, options)


if __name__ == "__main__":
    main()
