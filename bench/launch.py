"""How long it takes to start a job and to be rid of it: torchrun and ddp-launch in turns.

    python bench/launch.py [--rounds 7] [--ranks 2 8] [--json FILE] [--write-docs]

The script of the ranks imports torch, forms a Gloo group, does one all-reduce and exits. Counted from just before
the command is executed: until the last rank has torch imported, until that all-reduce is done, until the command
has exited; and the processor seconds of the command with all its processes.
"""

from __future__ import annotations

import os

from shown import machine, option_parser, report
from sidebyside import DDP_LAUNCH, TORCHRUN, Contender, Finding, Quantity, play
from watched import RANK_SCRIPTS, WatchedRun

SCRIPT = os.path.join(RANK_SCRIPTS, "one_reduction.py")
TARGETS = {2: (0.5, 0.43), 8: (0.2, 0.25)}  # all have torch, command exits; set for 2 CPUs


def measure(contender: Contender, ranks: int, timeout_s: float) -> dict[str, float]:
    command = contender.argv("--nproc-per-node", str(ranks), SCRIPT)
    with WatchedRun(command, dict(contender.env), timeout_s) as run:
        cpu = run.finish()
        return {
            "torch": run.last("torch", ranks) - run.started,
            "reduced": run.last("reduced", ranks) - run.started,
            "exit": run.ended[run.pid] - run.started,
            "cpu": cpu,
        }


def quantities(ranks: int) -> tuple[Quantity, ...]:
    imported, exited = TARGETS.get(ranks, (None, None))
    return (
        Quantity("torch", "all ranks have torch imported", ratio=imported),
        Quantity("reduced", "first all-reduce done"),
        Quantity("exit", "command has exited", ratio=exited),
        Quantity("cpu", "processor time, all processes"),
    )


def main() -> None:
    parser = option_parser(__doc__ or "")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8], help="default: 2 8")
    options = parser.parse_args()
    machine_line = machine()
    findings = []
    for ranks in options.ranks:

        def one(contender: Contender, ranks: int = ranks) -> dict[str, float]:
            return measure(contender, ranks, options.timeout)

        rounds = play(one, TORCHRUN, DDP_LAUNCH, options.rounds, options.warm_up)
        title = f"{ranks} rank{'s' if ranks != 1 else ''}"
        findings.append(Finding(title, quantities(ranks), rounds))
    report("launch", findings, machine_line, options)


if __name__ == "__main__":
    main()
