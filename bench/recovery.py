"""How long a job of two nodes stands still when a rank dies, and when a node does: torchrun and ddp-launch in turns.

    python bench/recovery.py [--rounds 5] [--node-rounds 2] [--train-for 8] [--parts death steps]
                             [--jobs JOB ...] [--others BIN] [--json FILE] [--write-docs]

Two nodes on this host, each with an agent of its own and two Gloo ranks, all in all-reduces without a pause. The first
node serves the rendezvous. A rank is lost: the last one sends itself SIGKILL. A node is lost: every process of the
second node is stopped (SIGSTOP) at once, so that, as after a power cut, nothing more comes from it and nobody is
told; the job may go on with one node (--nnodes 1:2). Counted from there until the first all-reduce of the next
generation is done on all of its ranks. torchrun gets fresh stores, as in bench/restart.py. A run without an end is
bounded, and counted.

The part "steps" measures until the first training step after a rank's death, for several jobs and launchers: see
first_step.py. torchft is not in it, since it has no nodes of several ranks with one DDP. Its table has a place of its
own in the document.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from time import monotonic
from typing import TYPE_CHECKING

import first_step as steps
import psutil
from shown import machine, option_parser, report
from sidebyside import DDP_LAUNCH, Contender, Finding, Quantity, play
from watched import RANK_SCRIPTS, RunFailed, WatchedRun

if TYPE_CHECKING:
    import argparse

SCRIPT = os.path.join(RANK_SCRIPTS, "recovers.py")
STARTER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "meet", "nodes.py")
TORCHRUN = Contender("torchrun", "torchrun", (("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),))
PER_NODE = 2
RANK_LOST = (
    Quantity("gone", "all old ranks gone, on both nodes"),
    Quantity("line", "first line of the next generation, last rank"),
    Quantity("reduced", "first all-reduce of the next generation", ratio=0.1),
)
NODE_LOST = (Quantity("reduced", "survivors' first all-reduce without it", limit=5.0),)


def command(contender: Contender, nnodes: str, script: list[str]) -> list[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    program = os.path.join(os.path.dirname(sys.executable), contender.command)
    words = [
        "--nnodes",
        nnodes,
        "--nproc-per-node",
        str(PER_NODE),
        "--max-restarts",
        "3",
        "--rdzv-id",
        "bench",
    ]
    if contender is not DDP_LAUNCH:
        # Without --local-addr it asks a name server for this host's name, for seconds where there is none.
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--local-addr", "127.0.0.1"]
    else:
        words += ["--rendezvous", endpoint]
    return [sys.executable, STARTER, "2", program, *words, *script]


def lose_a_rank(contender: Contender, timeout_s: float) -> dict[str, float]:
    with WatchedRun(command(contender, "2", [SCRIPT, "rank"]), dict(contender.env), timeout_s) as run:
        run.until(lambda run: len(run.of("reduced")) == 2 * PER_NODE)
        old = [stamp.pid for stamp in run.of("reduced")]
        for pid in old:
            run.watch(pid)
        run.open_gate(1)
        run.until(lambda run: len(run.of("reduced", attempt=1)) == 2 * PER_NODE)
        killed = run.last("kill", 1, attempt=0)
        return {
            "gone": max(run.ended[pid] for pid in old) - killed,
            "line": run.last("line", 2 * PER_NODE, attempt=1) - killed,
            "reduced": run.last("reduced", 2 * PER_NODE, attempt=1) - killed,
        }


def lose_a_node(contender: Contender, timeout_s: float) -> dict[str, float]:
    with WatchedRun(command(contender, "1:2", [SCRIPT, "node"]), dict(contender.env), timeout_s) as run:
        run.until(lambda run: len(run.of("reduced")) == 2 * PER_NODE)
        serving, other = nodes_of(run)
        run.mark("lost")
        lost_at = monotonic()
        for process in (other, *other.children(recursive=True)):
            process.send_signal(signal.SIGSTOP)
        assert serving.is_running()
        run.until(lambda run: len(run.of("reduced", attempt=1)) == PER_NODE)
        return {"reduced": run.last("reduced", PER_NODE, attempt=1) - lost_at}


def nodes_of(run: WatchedRun) -> tuple[psutil.Process, psutil.Process]:
    """The agent that serves, and the other one."""
    agents = psutil.Process(run.pid).children()
    serving = [a for a in agents if any(c.status == psutil.CONN_LISTEN for c in a.net_connections("tcp"))]
    if len(agents) != 2 or len(serving) != 1:
        raise RunFailed(f"{len(serving)} of {len(agents)} agents serve; there must be one of two")
    first = serving[0]
    return first, next(agent for agent in agents if agent != first)


def of_death(options: argparse.Namespace) -> None:
    machine_line = machine()
    contenders = (TORCHRUN, DDP_LAUNCH)
    rank_rounds = play(
        lambda c: lose_a_rank(c, options.timeout), *contenders, options.rounds, options.warm_up
    )
    node_rounds = play(lambda c: lose_a_node(c, options.timeout), *contenders, options.node_rounds, 0)
    findings = [
        Finding("seconds after a rank died", RANK_LOST, rank_rounds),
        Finding("seconds after a node fell silent", NODE_LOST, node_rounds),
    ]
    report("recovery", findings, machine_line, options)


OF_STEPS = steps.OfSteps(
    "recovery-steps",
    2 * PER_NODE,
    lambda contender, script: command(contender, "2", script),
    with_torchft=False,
    has_target=False,
)


def main() -> None:
    parser = option_parser(__doc__ or "", rounds=5, timeout_s=45.0)
    parser.add_argument("--node-rounds", type=int, default=2, help="of the node's loss (default 2)")
    steps.play_parts(parser, of_death, OF_STEPS)


if __name__ == "__main__":
    main()
