"""What an announced departure costs: a job of two nodes stands still while a spare takes the place of one of them.

    python bench/departure.py [--rounds 5] [--json FILE] [--write-docs]

Three nodes on this host, two of them with an agent and one Gloo rank that trains with `ddp.elastic`, the third a spare.
`ddpctl depart` runs beside the second node. A file announces that the node leaves. Counted is the longest time
between two steps of the whole job, and the steps that were done twice. The job must end well afterwards.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter

from recovery import STARTER
from shown import machine, option_parser, publish
from watched import RANK_SCRIPTS, Hung, RunFailed, Stamp, WatchedRun

SCRIPT = os.path.join(RANK_SCRIPTS, "departs.py")
BIN = os.path.dirname(sys.executable)
ENV = {"DDP_RENDEZVOUS_INSECURE": "1"}
RANKS = 2
TARGET_S = 1.0
_TRAINED = 40  # steps before the announcement, so that the spare waits with torch imported
_AFTER = 20


def ctl(endpoint: str, *words: str) -> list[str]:
    return [os.path.join(BIN, "ddpctl"), "--rendezvous", endpoint, *words]


def depart(timeout_s: float) -> tuple[float, int]:
    """Return the standstill in seconds, and the number of steps that were done again."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        notice, over = os.path.join(folder, "notice"), os.path.join(folder, "over")
        words = ["--nnodes", "2", "--spares", "1", "--nproc-per-node", "1", "--max-restarts", "3"]
        words += ["--rdzv-id", "bench", "--rendezvous", endpoint, SCRIPT, over]
        command = [sys.executable, STARTER, "3", os.path.join(BIN, "ddp-launch"), *words]
        with WatchedRun(command, ENV, timeout_s) as run:
            run.until(lambda run: len(_steps(run)) >= RANKS * _TRAINED)
            run.says("the node waits as a spare")
            asked = ctl(endpoint, "get", "bench", "-o", "json")
            known = json.loads(subprocess.check_output(asked, env={**os.environ, **ENV}))
            node = next(each["node"] for each in known["nodes"] if each.get("node_rank") == 1)
            watch = subprocess.Popen(
                ctl(endpoint, "depart", "bench", node, "--source", notice, "--every", "0.1"),
                env={**os.environ, **ENV},
                stderr=subprocess.DEVNULL,
            )
            _run_on(run, _TRAINED)
            with open(f"{notice}.part", "w", encoding="utf-8") as file:
                json.dump({"departs": "maintenance", "in_s": 60}, file)
            os.rename(f"{notice}.part", notice)
            before = {each.pid for each in run.stamps}
            run.until(lambda run: len([each for each in _steps(run) if each.pid not in before]) >= _AFTER)
            with open(over, "w", encoding="utf-8"):
                pass
            run.finish()
            if watch.wait(timeout=30) != 0:
                raise RunFailed("ddpctl depart has failed")
            return _standstill(run), _repeated(run)


def _steps(run: WatchedRun) -> list[Stamp]:
    return [each for each in run.stamps if each.event.startswith("step=")]


def _run_on(run: WatchedRun, steps: int) -> None:
    there = len(_steps(run)) + RANKS * steps
    run.until(lambda run: len(_steps(run)) >= there)


def _standstill(run: WatchedRun) -> float:
    """The longest time between the ends of two steps of the job: a step ends when its last rank has done it."""
    ends: dict[str, float] = {}
    for each in _steps(run):
        ends[each.event] = max(each.at, ends.get(each.event, 0.0))
    return max(later - earlier for earlier, later in itertools.pairwise(sorted(ends.values())))


def _repeated(run: WatchedRun) -> int:
    done = Counter((each.rank, each.event) for each in _steps(run))
    return len({step for (_rank, step), times in done.items() if times > 1})


def main() -> None:
    options = option_parser(__doc__ or "", rounds=5, timeout_s=120.0).parse_args()
    machine_line = machine()
    stood, repeated, failed = [], [], 0
    for _ in range(options.rounds):
        began = time.monotonic()
        try:
            seconds, again = depart(options.timeout)
        except (Hung, RunFailed) as problem:
            print(problem, file=sys.stderr)
            failed += 1
            continue
        stood.append(seconds)
        repeated.append(again)
        print(
            f"{seconds:.2f} s, {again} steps again ({time.monotonic() - began:.0f} s)",
            file=sys.stderr,
            flush=True,
        )
    runs = f"Rounds: {options.rounds}, {failed} runs without a figure. Machine: {machine_line}."
    text = f"{table(stood, repeated)}\n\n{runs}"
    publish("departure", text, {"machine": machine_line, "stood": stood, "repeated": repeated}, options)


def table(stood: list[float], repeated: list[int]) -> str:
    if not stood:
        return "No run has a figure."
    median = statistics.median(stood)
    verdict = "met" if median <= TARGET_S and not any(repeated) else "not met"
    return "\n".join(
        (
            "| a node announces that it leaves | the job stands still: median (min .. max) | target | |",
            "|---|---:|---:|---|",
            f"| a spare takes its place | {median:.2f} s ({min(stood):.2f} .. {max(stood):.2f}) "
            f"| <= {TARGET_S:.2f} s | {verdict} |",
            f"| steps done again | {max(repeated)} | 0 | |",
        )
    )


if __name__ == "__main__":
    main()
