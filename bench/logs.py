"""How fast rank output passes through the agent, what it costs a rank to write, and whether the agent grows.

    python bench/logs.py [--megabytes 1000] [--directory DIR] [--torchrun]

Each case runs the pump in a process of its own, with real ranks that write as fast as they can. "blocked" is the
longest single write of a rank (64 KiB each), "growth" the peak resident memory above that before the first byte.
With --torchrun, `torchrun --tee 3` runs the same rank for comparison (its ranks write to files directly, so that
only its time to show every line and its processor time compare).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time

from launcher.output.logs import LogPump, RankLabel
from launcher.settings.spec import LogSpec, StreamChoice, Streams

RANK = """
import json, os, sys, time
kind, total, report = sys.argv[1], int(sys.argv[2]), sys.argv[3]
unit = {
    "lines": b"x" * 99 + b"\\n",
    "bars": b"\\r 50%|" + b"#" * 93,
    "endless": b"y" * 100,
    "binary": b"\\xff" * 99 + b"\\n",
    "euro": "\\u20ac".encode() * 33 + b"\\n",
}[kind]
block = memoryview(unit * 655)
longest = written = 0
start = time.monotonic()
while written < total:
    before = time.monotonic()
    view = block
    while view:
        view = view[os.write(1, view):]
    longest = max(longest, time.monotonic() - before)
    written += len(block)
with open(report, "w") as file:
    json.dump({"longest": longest, "seconds": time.monotonic() - start, "bytes": written}, file)
"""

# name, what ranks write, ranks, where the terminal leads, log options
CASES: tuple[tuple[str, str, int, str, LogSpec], ...] = (
    ("file only (redirect)", "lines", 1, "null", LogSpec(redirects=StreamChoice(Streams.ALL))),
    ("/dev/null + file", "lines", 1, "null", LogSpec()),
    ("/dev/null + file, filter on, no match", "lines", 1, "null", LogSpec(stdout_filters=("apple",))),
    ("/dev/null + file, filter on, all match", "lines", 1, "null", LogSpec(stdout_filters=("x",))),
    ("pipe to cat", "lines", 1, "cat", LogSpec()),
    ("pipe to a reader that begins after 1 s", "lines", 1, "late", LogSpec()),
    ("4 ranks", "lines", 4, "null", LogSpec()),
    ("progress bars", "bars", 1, "null", LogSpec()),
    ("no newline ever", "endless", 1, "null", LogSpec()),
    ("UTF-8", "euro", 1, "null", LogSpec()),
    ("invalid UTF-8", "binary", 1, "null", LogSpec()),
)


def resident_kib(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field))


def run_case(number: int, megabytes: int, directory: str) -> dict[str, float]:
    """In its own process, which plays the agent."""
    _, kind, ranks, terminal, log = CASES[number]
    reader = f"{'sleep 1; ' if terminal == 'late' else ''}exec cat"
    cat = subprocess.Popen(["sh", "-c", reader], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert cat.stdin
    out = os.open(os.devnull, os.O_WRONLY) if terminal == "null" else cat.stdin.fileno()
    pump = LogPump(log, os.path.join(directory, "logs"), out, out)
    before = resident_kib("VmRSS")
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")
    reports = [os.path.join(directory, f"rank{rank}.json") for rank in range(ranks)]
    start, used = time.monotonic(), time.process_time()
    processes = []
    for rank, report in enumerate(reports):
        out_fd, err_fd = pump.open_rank(RankLabel("node0", rank, rank, "default", 0))
        command = [sys.executable, "-c", RANK, kind, str(megabytes * 1_000_000 // ranks), report]
        processes.append(subprocess.Popen(command, stdout=out_fd, stderr=err_fd))
        os.close(out_fd)
        os.close(err_fd)
    for process in processes:
        process.wait()
    pump.close(10)
    seconds, used = time.monotonic() - start, time.process_time() - used
    growth = resident_kib("VmHWM") - before
    cat.stdin.close()
    cat.wait()
    done = []
    for report in reports:
        with open(report) as file:
            done.append(json.load(file))
    return {
        "rate": sum(d["bytes"] for d in done) / seconds / 1e6,
        "cpu": used / (megabytes / 1000),
        "blocked": max(d["longest"] for d in done) * 1000,
        "growth": growth / 1024,
    }


def run_idle(seconds: float, directory: str) -> float:
    """Processor share of an idle pump with 16 open ranks, in per cent."""
    pump = LogPump(LogSpec(), directory)
    fds = [fd for rank in range(16) for fd in pump.open_rank(RankLabel("node0", rank, rank, "default", 0))]
    used = time.process_time()
    threading.Event().wait(seconds)
    used = time.process_time() - used
    for fd in fds:
        os.close(fd)
    pump.close(1)
    return used / seconds * 100


def run_torchrun(megabytes: int, directory: str) -> dict[str, float]:
    report = os.path.join(directory, "rank0.json")
    script = os.path.join(directory, "rank.py")
    with open(script, "w") as file:
        file.write(RANK)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--tee",
        "3",
        "--log-dir",
        directory,
    ]
    command += [script, "lines", str(megabytes * 1_000_000), report]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.monotonic()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    seconds = time.monotonic() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"rate": megabytes / seconds, "cpu": used / (megabytes / 1000)}


def in_child(arguments: list[str]) -> dict[str, float]:
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=1000, help="written in each case (default 1000)")
    parser.add_argument("--directory", help="where the files go (default: the temporary directory)")
    parser.add_argument("--torchrun", action="store_true", help="compare with torchrun --tee 3")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    directory = tempfile.mkdtemp(dir=options.directory)
    try:
        if options.case is not None:
            print(json.dumps(run_case(options.case, options.megabytes, directory)))
            return
        print(f"| {'case':40} | MB/s | agent CPU s/GB | blocked ms | growth MiB |")
        print(f"|{'-' * 42}|-----:|---------------:|-----------:|-----------:|")
        for number, (name, *_) in enumerate(CASES):
            r = in_child(
                ["--case", str(number), "--megabytes", str(options.megabytes), "--directory", directory]
            )
            figures = f"{r['rate']:4.0f} | {r['cpu']:14.2f} | {r['blocked']:10.1f} | {r['growth']:10.1f}"
            print(f"| {name:40} | {figures} |", flush=True)
        if options.torchrun:
            r = run_torchrun(options.megabytes, directory)
            name = "torchrun --tee 3 (start and rank included)"
            print(f"| {name:40} | {r['rate']:4.0f} | {r['cpu']:14.2f} | {'-':>10} | {'-':>10} |")
        print(f"\nidle, 16 ranks: {run_idle(3.0, os.path.join(directory, 'idle')):.2f} % of a CPU")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
