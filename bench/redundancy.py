"""What redundancy of shards in memory costs, and how fast a job resumes after two of eight nodes were lost.

    python bench/redundancy.py [--rounds 7] [--json FILE] [--write-docs]

1. The arithmetic of the code, on one core, for each instruction set, beside ISA-L if libisal is installed.
2. A GPT-like model (24M parameters, Adam, FSDP2) in 4 processes of one thread, each a node of its own: how long a
   commit takes to be protected when the ranks wait for it, and the processor time for it, of all ranks, beside that of
   ten steps. With --rounds, blocks of nine steps after a commit that is protected or not alternate; 0 leaves this out.
3. The time of resume() in 8 processes after the memory of two of them was removed.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shown import machine, option_parser, publish

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from ddp_launch_wings.redundancy import parity, placement

if TYPE_CHECKING:
    from collections.abc import Callable

RANK = Path(__file__).parent / "ranks" / "redundant.py"
CODES = [(6, 2), (3, 1), (4, 2), (10, 4)]
CHUNK = 1 << 20


# --- arithmetic --------------------------------------------------------------------------------------


def gb_per_s(action: Callable[[], object], n_bytes: int) -> float:
    """The median of several short runs."""
    found = []
    action()
    for _ in range(9):
        began, runs = time.perf_counter(), 0
        while time.perf_counter() - began < 0.05:
            action()
            runs += 1
        found.append(runs * n_bytes / (time.perf_counter() - began) / 1e9)
    return statistics.median(found)


def ours(k: int, m: int, instructions: str) -> float:
    inputs = [memoryview(bytearray(os.urandom(CHUNK))) for _ in range(k)]
    outputs = [memoryview(bytearray(CHUNK)) for _ in range(m)]
    rows = placement.parity_rows(k, m)
    native = parity.compiled()
    if instructions == "torch" or native is None:
        return gb_per_s(lambda: parity.combine_with_torch(rows, inputs, outputs), k * CHUNK)
    native.choose(instructions)
    return gb_per_s(lambda: parity.combine(rows, inputs, outputs), k * CHUNK)


def isa_l(k: int, m: int) -> float | None:
    name = ctypes.util.find_library("isal")
    if name is None:
        return None
    library = ctypes.CDLL(name)
    rows = [each for row in placement.parity_rows(k, m) for each in row]
    tables = ctypes.create_string_buffer(32 * k * m)
    library.ec_init_tables(k, m, bytes(rows), tables)
    data = [ctypes.create_string_buffer(os.urandom(CHUNK), CHUNK) for _ in range(k)]
    theirs = [ctypes.create_string_buffer(CHUNK) for _ in range(m)]
    sources = (ctypes.c_void_p * k)(*map(ctypes.addressof, data))
    targets = (ctypes.c_void_p * m)(*map(ctypes.addressof, theirs))
    speed = gb_per_s(lambda: library.ec_encode_data(CHUNK, k, m, tables, sources, targets), k * CHUNK)
    outputs = [memoryview(bytearray(CHUNK)) for _ in range(m)]
    parity.combine(placement.parity_rows(k, m), [memoryview(bytearray(each.raw)) for each in data], outputs)
    assert [bytes(each) for each in outputs] == [
        each.raw for each in theirs
    ]  # the same field, the same bytes
    return speed


def arithmetic() -> list[str]:
    native = parity.compiled()
    sets = [*(native.sets() if native is not None else ()), "torch"]
    lines = [f"| code | {' | '.join(sets)} | ISA-L |", f"|---|{'---:|' * (len(sets) + 1)}"]
    for k, m in CODES:
        figures = [f"{ours(k, m, each):.1f}" for each in sets]
        theirs = isa_l(k, m)
        lines.append(
            f"| {k}+{m} | {' | '.join(figures)} | {'not installed' if theirs is None else f'{theirs:.1f}'} |"
        )
    if native is not None:
        native.choose(native.sets()[0])
    return lines


# --- jobs --------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def play(
    folder: Path, mode: str, ranks: int, redundancy: str, every: int, rounds: int, timeout_s: float
) -> list[Any]:
    """What the ranks wrote."""
    shared = os.environ | {"MODE": mode, "OUT": str(folder), "REDUNDANCY": redundancy, "ROUNDS": str(rounds)}
    shared["EVERY"] = str(every)
    shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "bench", "OMP_NUM_THREADS": "1"}
    processes = []
    for rank in range(ranks):
        node = folder / f"node{rank}"
        node.mkdir(mode=0o700, exist_ok=True)
        env = shared | {"RANK": str(rank), "LOCAL_RANK": "0", "DDP_SCRATCH": str(node)}
        processes.append(subprocess.Popen([sys.executable, str(RANK)], env=env))
    try:
        for each in processes:
            if each.wait(timeout_s):
                raise SystemExit(f"a rank ended with {each.returncode}")
    finally:
        for each in processes:
            each.kill()
    return [json.loads((folder / f"{mode}-{rank}.json").read_text()) for rank in range(ranks)]


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} .. {max(values):.3f})"


def one_commit(folder: Path, redundancy: str, timeout_s: float) -> str:
    told = play(folder, "prepare", 4, redundancy, 10, 0, timeout_s)
    slots, parity = sum(each["slots"] for each in told), sum(each["parity"] for each in told)
    used, of_steps = (sum(each[name] for each in told) for name in ("protecting_cpu_s", "steps_cpu_s"))
    cells = [redundancy, f"{slots / 2**20:.0f} MiB", f"{1 + parity / slots:.3f}"]
    cells += [
        f"{max(each['protecting_s'] for each in told):.2f} s",
        f"{used:.2f} s",
        f"{used / of_steps:.1%}",
    ]
    return f"| {' | '.join(cells)} |"


def steps(folder: Path, redundancy: str, rounds: int, timeout_s: float) -> str:
    told = play(folder, "steps", 4, redundancy, 10, rounds, timeout_s)
    pairs = list(zip(*(each["pairs"] for each in told), strict=True))  # by round, then by rank
    seconds = [max(on[0] for on, _off in pair) / max(off[0] for _on, off in pair) for pair in pairs]
    used = [sum(on[1] for on, _off in pair) / sum(off[1] for _on, off in pair) for pair in pairs]
    step_ms = statistics.median(max(off[0] for _on, off in pair) for pair in pairs) / 9 * 1e3
    return f"| {redundancy} | {step_ms:.0f} ms | {spread(seconds)} | {spread(used)} |"


def resume(folder: Path, timeout_s: float) -> str:
    told = play(folder, "prepare", 8, "code:6+2", 1, 0, timeout_s)
    slots, parity = sum(each["slots"] for each in told), sum(each["parity"] for each in told)
    for rank in (2, 5):
        shutil.rmtree(folder / f"node{rank}")
    after = play(folder, "resume", 8, "code:6+2", 1, 0, timeout_s)
    assert all(each["in_memory"] for each in after)
    longest = max(each["resume_s"] for each in after)
    return (
        f"2 of 8 nodes lost with `code:6+2`: resume() took {longest:.2f} s, from memory. The commits had "
        f"{slots / 2**20:.0f} MiB, the parity {parity / 2**20:.0f} MiB: {1 + parity / slots:.3f} times the memory."
    )


def main() -> None:
    parser = option_parser(__doc__ or "", timeout_s=900.0)
    parser.add_argument(
        "--codes", nargs="+", default=["copies:1", "code:3+1", "code:2+2"], help="of the steps"
    )
    options = parser.parse_args()
    machine_line = machine()
    lines = ["GB of data per second, one core, pieces of 1 MiB:", "", *arithmetic(), ""]
    lines += [
        "| redundancy | commit | memory | protected after | processor time for it | of that of ten steps |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for redundancy in options.codes:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            lines.append(one_commit(Path(folder), redundancy, options.timeout))
            print(lines[-1], file=sys.stderr, flush=True)
    if options.rounds:
        lines += [
            "",
            "| redundancy | a step without | steps with / without | processor time with / without |",
        ]
        lines += ["|---|---:|---:|---:|"]
    for redundancy in options.codes if options.rounds else ():
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            lines.append(steps(Path(folder), redundancy, options.rounds, options.timeout))
            print(lines[-1], file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        lines += ["", resume(Path(folder), options.timeout)]
    text = "\n".join(lines) + f"\n\nRounds: {options.rounds}. Machine: {machine_line}."
    publish("redundancy", text, lines, options)


if __name__ == "__main__":
    main()
