"""How long an all-reduce takes, by size: Gloo, shm, hier, and MPI where mpi4py is installed, in turns.

    python bench/allreduce.py [--rounds 7] [--ranks 2 4] [--largest 268435456] [--json FILE] [--write-docs]

float32, one thread per rank, all ranks on this machine. `copy`: an ordinary tensor. `in place`: a tensor that lies
in memory from ddp_allocate. `hier`: the ranks count as two hosts, joined by a TCP ring over the loopback. `ring`: every
rank counts as a host. In every round each contender runs at each size, in an order that rotates; a factor is Gloo's
time over the contender's in the same round, and the figure is the median of these.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

from shown import ROOT, draw_chart, machine, option_parser, publish

SIZES = [4, 64, 1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 25 << 20, 1 << 26, 1 << 28]
# For 2 ranks: so many times as fast as Gloo.
TARGETS = {4: 30.0, 1 << 16: 20.0, 1 << 22: 8.0, 1 << 26: 4.0}
NAMES = ["gloo", "shm, copy", "shm, in place", "hier", "ring", "mpi4py"]


@dataclass(frozen=True, slots=True)
class Table:
    ranks: int
    names: list[str]
    times: dict[int, dict[str, list[float]]]  # size -> name -> seconds, one per round

    def factors(self, size: int, name: str) -> list[float]:
        row = self.times[size]
        return [theirs / ours for theirs, ours in zip(row["gloo"], row[name], strict=True)]


# --- a rank ------------------------------------------------------------------------------------------


def rank_main(folder: str, sizes: list[int], rounds: int) -> None:
    sys.path.insert(0, ROOT)
    import torch
    import torch.distributed as dist

    import ddp.shm

    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert ddp.shm.register(), "the compiled core is not there"
    store = dist.FileStore(os.path.join(folder, "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    contenders = _contenders(dist, rank, world)
    times = {size: _one_size(torch, dist, contenders, size, rounds) for size in sizes}
    if rank == 0:
        with open(os.path.join(folder, "times.json"), "w") as file:
            json.dump(times, file)
    dist.barrier()
    dist.destroy_process_group()


def _contenders(dist, rank, world):
    """name -> (tensor of so many elements, one all-reduce of it)"""
    import torch

    def over(group):
        return lambda tensor: dist.all_reduce(tensor, group=group)

    def as_hosts(key):
        os.environ["DDP_HOST_KEY"] = str(key)
        group = dist.new_group(backend="hier")
        del os.environ["DDP_HOST_KEY"]
        return group

    near = dist.new_group(backend="shm")
    made = {
        "gloo": (torch.ones, over(dist.group.WORLD)),
        "shm, copy": (torch.ones, over(near)),
        "shm, in place": (lambda numel: near.ddp_allocate(numel, torch.float32).fill_(1), over(near)),
        "ring": (torch.ones, over(as_hosts(rank))),
    }
    if world > 2:
        made["hier"] = (torch.ones, over(as_hosts(rank * 2 // world)))
    if os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE"):
        from mpi4py import MPI

        made["mpi4py"] = (torch.ones, lambda tensor: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, tensor.numpy()))
    return made


def _one_size(torch, dist, contenders, size, rounds):
    names = list(contenders)
    tensors = {name: make(size // 4) for name, (make, _) in contenders.items()}
    repeats = max(1, min(200, (8 << 20) // size))
    taken = {name: [] for name in names}
    for number in range(-1, rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            reduce = contenders[name][1]
            seconds = _timed(dist, reduce, tensors[name].zero_(), repeats)
            if number >= 0:
                taken[name].append(seconds)
    return taken


def _timed(dist, reduce, tensor, repeats):
    dist.barrier()
    reduce(tensor)
    began = time.perf_counter()
    for _ in range(repeats):
        reduce(tensor)
    return (time.perf_counter() - began) / repeats


# --- all ranks ---------------------------------------------------------------------------------------


def measure(ranks: int, sizes: list[int], rounds: int, timeout_s: float) -> Table:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, os.path.abspath(__file__), "--as-rank", folder]
        command += ["--rounds", str(rounds), "--sizes", *map(str, sizes)]
        if start := _mpirun():
            _run([*start, "-n", str(ranks), "sh", "-c", _AS_MPI_RANK, "sh", *command], timeout_s)
        else:
            _run_ranks(command, ranks, timeout_s)
        with open(os.path.join(folder, "times.json")) as file:
            times = {int(size): row for size, row in json.load(file).items()}
    names = [name for name in NAMES if name in next(iter(times.values()))]
    return Table(ranks, names, times)


def _mpirun() -> list[str]:
    """Of the MPI that was installed beside Python, else the system's; nothing where MPI or mpi4py is not there."""
    beside = os.path.dirname(sys.executable)
    found = shutil.which("mpirun", path=os.pathsep.join((beside, os.environ.get("PATH", os.defpath))))
    if found is None or importlib.util.find_spec("mpi4py") is None:
        return []
    said = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=30).stdout
    return [found, "--oversubscribe", "--allow-run-as-root"] if "Open MPI" in said else [found]


_AS_MPI_RANK = (
    "RANK=${OMPI_COMM_WORLD_RANK:-$PMI_RANK} WORLD_SIZE=${OMPI_COMM_WORLD_SIZE:-$PMI_SIZE} "
    'GLOO_SOCKET_IFNAME=lo MASTER_ADDR=127.0.0.1 exec "$@"'
)


def _run(command: list[str], timeout_s: float) -> None:
    subprocess.run(command, check=True, timeout=timeout_s)


def _run_ranks(command: list[str], ranks: int, timeout_s: float) -> None:
    env = {**os.environ, "WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
    deadline = time.monotonic() + timeout_s
    started = [subprocess.Popen(command, env={**env, "RANK": str(rank)}) for rank in range(ranks)]
    try:
        for process in started:
            if process.wait(max(1.0, deadline - time.monotonic())):
                raise SystemExit("a rank failed")
    finally:
        for process in started:
            process.kill()
            process.wait()


# --- what is shown -----------------------------------------------------------------------------------


def text_of(table: Table) -> str:
    others = table.names[1:]
    lines = [
        f"| {table.ranks} ranks | Gloo | "
        + " | ".join(f"{name} | times faster" for name in others)
        + " | target | |",
        "|---:|---:|" + "---:|---:|" * len(others) + "---:|---|",
    ]
    for size, row in table.times.items():
        cells = [_size(size), _time(row["gloo"])]
        for name in others:
            cells += [_time(row[name]), f"{statistics.median(table.factors(size, name)):.1f}"]
        lines.append(f"| {' | '.join([*cells, *_verdict(table, size)])} |")
    return "\n".join(lines)


def _verdict(table: Table, size: int) -> tuple[str, str]:
    target = TARGETS.get(size) if table.ranks == 2 else None
    if target is None:
        return "", ""
    said = []
    for name in ("shm, copy", "shm, in place"):
        met = statistics.median(table.factors(size, name)) >= target
        said.append(f"{name.removeprefix('shm, ')} {'met' if met else 'not met'}")
    return f">= {target:g}", "; ".join(said)


def _size(size: int) -> str:
    for unit, name in ((1 << 20, "MB"), (1 << 10, "KB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def _time(seconds: list[float]) -> str:
    median = statistics.median(seconds)
    return f"{median * 1e6:.0f} us" if median < 1e-3 else f"{median * 1e3:.1f} ms"


def draw(path: str, tables: list[Table], machine_line: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(tables), figsize=(5.5 * len(tables), 4.2), squeeze=False, layout="constrained"
    )
    for axis, table in zip(axes[0], tables, strict=True):
        for name in table.names:
            medians = [statistics.median(row[name]) * 1e6 for row in table.times.values()]
            axis.loglog(list(table.times), medians, "o-", label=name, markersize=3)
        axis.set_title(f"{table.ranks} ranks")
        axis.set_xlabel("bytes")
        axis.set_ylabel("microseconds")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.supxlabel(machine_line, fontsize=6, color="#606060")
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = option_parser(__doc__ or "", timeout_s=600.0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="default: 2 4")
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="bytes (default 256 MB)")
    parser.add_argument("--sizes", type=int, nargs="+", help="bytes (default: from 4 B on)")
    parser.add_argument("--as-rank", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = options.sizes or [size for size in SIZES if size <= options.largest]
    if options.as_rank:
        rank_main(options.as_rank, sizes, options.rounds)
        return
    machine_line = machine()
    tables = [measure(ranks, sizes, options.rounds, options.timeout) for ranks in options.ranks]
    notes = f"Rounds: {options.rounds}. Machine: {machine_line}."
    if not _mpirun():
        notes = "mpi4py is not installed here, so MPI has no column. " + notes
    text = "\n\n".join([*map(text_of, tables), notes])
    whole = {"machine": machine_line, "tables": [[t.ranks, t.times] for t in tables]}
    publish("allreduce", text, whole, options)
    draw_chart(options, "allreduce", lambda path: draw(path, tables, machine_line))


if __name__ == "__main__":
    main()
