"""What the launcher itself costs while a job runs: torchrun and ddp-launch in turns.

    python bench/agent.py [--rounds 5] [--seconds 10] [--json FILE] [--write-docs]

Two ranks form a Gloo group and then sleep. The agent is the process of the command. ddp-launch has two more that
are no rank: the zygote, which has torch imported, and the keeper of the store, forked from it. They are counted
in the rows that say so. RSS counts a page shared by several processes in each of them; PSS divides it among them,
so only PSS adds up. Over the next seconds, in which nothing happens: the processor time of the agent.
"""

from __future__ import annotations

import os
import time

import psutil
from shown import machine, option_parser, report
from sidebyside import DDP_LAUNCH, TORCHRUN, Contender, Finding, Quantity, play
from watched import RANK_SCRIPTS, WatchedRun

SCRIPT = os.path.join(RANK_SCRIPTS, "sleeps.py")
RANKS = 2
MEMORY = (
    Quantity("agent_rss", "agent alone, RSS", "MiB", ratio=0.2),
    Quantity("agent_pss", "agent alone, PSS", "MiB"),
    Quantity("launcher_rss", "agent and other launcher processes, RSS", "MiB"),
    Quantity("launcher_pss", "agent and other launcher processes, PSS", "MiB"),
    Quantity("job_pss", "whole job, ranks included, PSS", "MiB"),
)
IDLE = (
    Quantity("agent_cpu", "agent alone, CPU", "%", limit=0.5),
    Quantity("launcher_cpu", "agent and other launcher processes, CPU", "%"),
)
_MIB = 2**20


def measure(contender: Contender, seconds: float, timeout_s: float) -> dict[str, float]:
    command = contender.argv("--nproc-per-node", str(RANKS), SCRIPT)
    with WatchedRun(command, dict(contender.env), timeout_s + seconds) as run:
        run.until(lambda run: len(run.of("reduced")) == RANKS)
        figures = _figures(psutil.Process(run.pid), [stamp.pid for stamp in run.of("reduced")], seconds)
        run.open_gate(RANKS)
        run.finish()
        return figures


def _figures(agent: psutil.Process, rank_pids: list[int], seconds: float) -> dict[str, float]:
    time.sleep(0.5)  # what belongs to the start is over
    job = [agent, *agent.children(recursive=True)]
    launcher = [process for process in job if process.pid not in rank_pids]
    before = {process.pid: _cpu_seconds(process.pid) for process in launcher}
    began = time.monotonic()
    time.sleep(seconds)
    over = time.monotonic() - began
    cpu = {pid: (_cpu_seconds(pid) - used) / over * 100 for pid, used in before.items()}
    memory = {process.pid: process.memory_full_info() for process in job}
    return {
        "agent_rss": memory[agent.pid].rss / _MIB,
        "agent_pss": memory[agent.pid].pss / _MIB,
        "launcher_rss": sum(memory[process.pid].rss for process in launcher) / _MIB,
        "launcher_pss": sum(memory[process.pid].pss for process in launcher) / _MIB,
        "job_pss": sum(process.pss for process in memory.values()) / _MIB,
        "agent_cpu": cpu[agent.pid],
        "launcher_cpu": sum(cpu.values()),
    }


def _cpu_seconds(pid: int) -> float:
    """All threads, by the kernel's clock for that process: ticks of 10 ms are too coarse for an idle one."""
    return time.clock_gettime((~pid << 3) | 2)


def main() -> None:
    parser = option_parser(__doc__ or "", rounds=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to look on (default 10)")
    options = parser.parse_args()
    machine_line = machine()
    rounds = play(
        lambda contender: measure(contender, options.seconds, options.timeout),
        TORCHRUN,
        DDP_LAUNCH,
        options.rounds,
        options.warm_up,
    )
    findings = [Finding("memory, 2 ranks", MEMORY, rounds), Finding("2 sleeping ranks", IDLE, rounds)]
    report("agent", findings, machine_line, options)


if __name__ == "__main__":
    main()
