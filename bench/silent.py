"""How long after its lease a silent node holds up the others, whose ranks keep their processes or are restarted.

    python bench/silent.py [--rounds 5] [--json FILE] [--write-docs]

Two nodes on this host, each with an agent of its own and two Gloo ranks that train with `ddp.elastic`. The first node
serves the rendezvous. Every process of the second node is stopped (SIGSTOP) at once, so that, as after a power cut,
nothing more comes from it and nobody is told; the job goes on with one node (--nnodes 1:2). The lease of a node is 4 s
here, counted from its last heartbeat. Time begins when the agent says that the node is lost, and ends when all ranks
that are left have finished a training step.
"""

from __future__ import annotations

import os
import signal
import socket
import statistics
import sys
import time

from recovery import PER_NODE, STARTER, nodes_of
from shown import machine, option_parser, publish
from watched import RANK_SCRIPTS, Hung, RunFailed, WatchedRun

SCRIPT = os.path.join(RANK_SCRIPTS, "heals.py")
HOW = ("in-place", "restart")
TARGET_S = 0.3
LOST = "no heartbeat for"


def command(how: str) -> list[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    program = os.path.join(os.path.dirname(sys.executable), "ddp-launch")
    words = ["--nnodes", "1:2", "--nproc-per-node", str(PER_NODE), "--max-restarts", "3", "--recover", how]
    words += ["--rdzv-id", "bench", "--rendezvous", endpoint]
    words += ["--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=4"]
    return [sys.executable, STARTER, "2", program, *words, SCRIPT, "1"]


def after_the_lease(how: str, timeout_s: float) -> float:
    with WatchedRun(command(how), {"DDP_RENDEZVOUS_INSECURE": "1"}, timeout_s) as run:
        run.until(lambda run: len(run.of("stepped")) == 2 * PER_NODE)
        time.sleep(1.0)  # it trains
        _serving, other = nodes_of(run)
        for process in (other, *other.children(recursive=True)):
            process.send_signal(signal.SIGSTOP)
        lost_at = run.says(LOST)
        run.until(lambda run: len(run.of("stepped", attempt=1)) == PER_NODE)
        return run.last("stepped", PER_NODE, attempt=1) - lost_at


def main() -> None:
    options = option_parser(__doc__ or "", rounds=5, timeout_s=45.0).parse_args()
    machine_line = machine()
    taken: dict[str, list[float]] = {how: [] for how in HOW}
    failed = 0
    for number in range(options.rounds):
        for how in HOW if number % 2 == 0 else HOW[::-1]:
            try:
                taken[how].append(after_the_lease(how, options.timeout))
            except (Hung, RunFailed) as problem:
                print(f"{how}: {problem}", file=sys.stderr)
                failed += 1
            else:
                print(f"{how}: {taken[how][-1]:.3f} s", file=sys.stderr, flush=True)
    text = f"{table(taken)}\n\nRounds: {options.rounds}, {failed} runs without a figure. Machine: {machine_line}."
    publish("silent", text, {"machine": machine_line, "taken": taken, "failed": failed}, options)


def table(taken: dict[str, list[float]]) -> str:
    lines = [
        "| a node of two fell silent | after its lease: median (min .. max) | target | |",
        "|---|---:|---:|---|",
    ]
    for how, seconds in taken.items():
        median = statistics.median(seconds) if seconds else float("nan")
        figure = f"{median:.2f} s ({min(seconds):.2f} .. {max(seconds):.2f})" if seconds else "no figure"
        verdict = ("", "")
        if how == "in-place":
            verdict = (f"<= {TARGET_S:.2f} s", "met" if median <= TARGET_S else "not met")
        lines.append(f"| `--recover {how}` | {figure} | {verdict[0]} | {verdict[1]} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
