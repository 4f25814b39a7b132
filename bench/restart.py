"""How long a job stands still when a rank dies: torchrun and ddp-launch in turns.

    python bench/restart.py [--rounds 7] [--train-for 8] [--parts death steps] [--jobs JOB ...] [--others BIN]
                            [--shared-store] [--json FILE] [--write-docs]

One node, two Gloo ranks. After an all-reduce the last rank sends itself SIGKILL while the other waits for it in
the next one. Counted from just before the kill: until both old ranks are gone, until the last rank of the new
attempt is at its first line, until the first all-reduce of the new attempt is done on both.

A second script trains with torch's DDP and AdamW. The last rank kills itself half a second after the first step, and
in other runs some seconds after it, as in a job that has trained for a while. Counted until both ranks of the new
attempt have finished their first step. The part "steps" does the same for more jobs and launchers: see first_step.py.
Its table has a place of its own in the document.

torchrun gives the new attempt the store of the old one, and Gloo can hang on what it finds there. For a fair run
it gets TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which makes rank 0 host a fresh store; --shared-store leaves that
out and shows torchrun as it comes. Every run is bounded, and runs that hang are counted under the table.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import first_step as steps
from shown import machine, option_parser, report
from sidebyside import DDP_LAUNCH, TORCHRUN, Contender, Finding, Quantity, play
from watched import RANK_SCRIPTS, WatchedRun

if TYPE_CHECKING:
    import argparse

SCRIPT = os.path.join(RANK_SCRIPTS, "dies_once.py")
TRAINS = os.path.join(RANK_SCRIPTS, "trains_once.py")
RANKS = 2
_FIRST_SECOND_S = 0.5
FRESH_STORE = (("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),)
STEPPED = (Quantity("stepped", "first training step of the new attempt", ratio=0.15),)
QUANTITIES = (
    Quantity("gone", "all old ranks gone"),
    Quantity("line", "first line of the new attempt, last rank"),
    Quantity("reduced", "first all-reduce of the new attempt", ratio=0.06),
)


def measure(contender: Contender, timeout_s: float) -> dict[str, float]:
    with WatchedRun(command(contender, [SCRIPT]), dict(contender.env), timeout_s) as run:
        run.until(lambda run: len(run.of("reduced")) == RANKS)
        old = [stamp.pid for stamp in run.of("reduced")]
        for pid in old:
            run.watch(pid)
        run.open_gate(1)
        run.finish()
        killed = run.last("kill", 1)
        return {
            "gone": max(run.ended[pid] for pid in old) - killed,
            "line": run.last("line", RANKS, attempt=1) - killed,
            "reduced": run.last("reduced", RANKS, attempt=1) - killed,
        }


def first_step(contender: Contender, train_for_s: float, timeout_s: float) -> dict[str, float]:
    with WatchedRun(command(contender, [TRAINS]), dict(contender.env), timeout_s + train_for_s) as run:
        run.until(lambda run: len(run.of("stepped")) == RANKS)
        time.sleep(train_for_s)  # what is measured depends on it, so it is a part of the measurement
        run.open_gate(1)
        run.finish()
        return {"stepped": run.last("stepped", RANKS, attempt=1) - run.last("kill", 1)}


def of_death(options: argparse.Namespace) -> None:
    theirs = TORCHRUN if options.shared_store else Contender("torchrun", "torchrun", FRESH_STORE)
    machine_line = machine()
    rounds = play(
        lambda contender: measure(contender, options.timeout),
        theirs,
        DDP_LAUNCH,
        options.rounds,
        options.warm_up,
    )
    findings = [Finding("seconds after the death", QUANTITIES, rounds)]
    for seconds in (_FIRST_SECOND_S, options.train_for):
        trained = play(
            lambda contender, seconds=seconds: first_step(contender, seconds, options.timeout),
            theirs,
            DDP_LAUNCH,
            options.rounds,
            options.warm_up,
        )
        title = f"seconds after the death, in a job that has trained for {seconds:g} s"
        findings.append(Finding(title, STEPPED, trained))
    report("restart", findings, machine_line, options)


def command(contender: Contender, script: list[str]) -> list[str]:
    return contender.argv("--nproc-per-node", str(RANKS), "--max-restarts", "3", *script)


OF_STEPS = steps.OfSteps("restart-steps", RANKS, command, with_torchft=True, has_target=True)


def main() -> None:
    parser = option_parser(__doc__ or "", timeout_s=30.0)
    parser.add_argument("--shared-store", action="store_true", help="torchrun as it comes; it may hang")
    steps.play_parts(parser, of_death, OF_STEPS)


if __name__ == "__main__":
    main()
