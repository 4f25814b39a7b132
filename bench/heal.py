"""How long training stands still when a rank dies: torchrun, ddp-launch with restarts, ddp-launch in place, in turns.

    python bench/heal.py [--rounds 5] [--deaths 5] [--train-for 8] [--jobs JOB ...] [--json FILE] [--write-docs]

One node, two Gloo ranks. All run the same script, which trains with AdamW and keeps its state with `ddp.elastic`. The
last rank kills itself at some point of a step, in a job that has trained for some seconds, several times in each run.
Counted from the kill until all ranks have finished a training step: under torchrun and with `--recover restart` these
are new processes, in place all but one are the old ones.

The number of ranks stays the same, so the next step of the survivors needs the replacement as well. The second figure
in place is the time of the survivors less the median time of their steps before the death.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import TYPE_CHECKING

from shown import machine, option_parser, report
from sidebyside import DDP_LAUNCH, Contender, Finding, Quantity, Round, play_all
from watched import RANK_SCRIPTS, WatchedRun

if TYPE_CHECKING:
    from collections.abc import Sequence

SCRIPT = os.path.join(RANK_SCRIPTS, "heals.py")
RANKS = 2
FRESH_STORE = (("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),)
TORCHRUN = Contender("torchrun", "torchrun", FRESH_STORE)
RESTARTS = Contender("restarts", DDP_LAUNCH.command)
IN_PLACE = Contender("in place", DDP_LAUNCH.command)
JOBS = {
    "mlp ours": "MLP of 1M parameters, our DDP",
    "mlp torch": "MLP of 1M parameters, torch's DDP",
    "gpt ours": "GPT-like model of 5M parameters, our DDP",
    "gpt torch": "GPT-like model of 5M parameters, torch's DDP",
    "mlp torch compile": "MLP of 1M parameters, torch's DDP, compiled",
}
ALL_STEPPED = "all ranks have finished a step"
BEYOND = Quantity("beyond", "survivors' next step, beyond the time of a step", limit=0.1)


def stands_still(
    contender: Contender, words: Sequence[str], deaths: int, train_for_s: float, timeout_s: float
) -> dict[str, float]:
    how = {"in place": ["--recover", "in-place"], "restarts": ["--recover", "restart"]}.get(
        contender.name, []
    )
    options = ["--nproc-per-node", str(RANKS), "--max-restarts", str(deaths + 1), *how]
    command = contender.argv(*options, SCRIPT, str(deaths), *words)
    with WatchedRun(command, dict(contender.env), timeout_s + (deaths + 1) * train_for_s) as run:
        for attempt in range(deaths):
            run.until(lambda run, attempt=attempt: len(run.of("stepped", attempt)) == RANKS)  # type: ignore[misc]
            # What is measured depends on it (the zygote learns imports while the ranks train).
            time.sleep(train_for_s if not attempt else 1.0)
            run.open_gate(1)
        run.finish()
        return _figures(run, deaths)


def _figures(run: WatchedRun, deaths: int) -> dict[str, float]:
    killed = [run.last("kill", 1, attempt) for attempt in range(deaths)]
    pauses = [run.last("stepped", RANKS, number + 1) - at for number, at in enumerate(killed)]
    figures = {"stepped": statistics.median(pauses)}
    first = {stamp.pid for stamp in run.of("stepped")}
    of_survivors = [
        [stamp.at for stamp in run.of("stepped", number + 1) if stamp.pid in first]
        for number in range(deaths)
    ]
    if all(of_survivors) and (taken := run.values("step_s")):
        step_s = statistics.median(taken)
        figures["beyond"] = statistics.median(
            max(stamps) - at - step_s for stamps, at in zip(of_survivors, killed, strict=True)
        )
    return figures


def main() -> None:
    parser = option_parser(__doc__ or "", rounds=5, timeout_s=60.0)
    parser.add_argument("--deaths", type=int, default=5, help="of one run (default 5)")
    parser.add_argument(
        "--train-for", type=float, default=8.0, help="seconds from the first step to the first death"
    )
    parser.add_argument(
        "--jobs", nargs="+", choices=tuple(JOBS), default=list(JOBS), help="default: all of them"
    )
    options = parser.parse_args()
    machine_line = machine()
    findings = []
    for job in options.jobs:
        rounds = [
            play_all(
                lambda contender, job=job: stands_still(  # type: ignore[misc]
                    contender, job.split(), options.deaths, options.train_for, options.timeout
                ),
                (TORCHRUN, RESTARTS, IN_PLACE),
                number,
            )
            for number in range(-options.warm_up, options.rounds)
        ][options.warm_up :]
        for ours, quantities in (
            (RESTARTS, (Quantity("stepped", f"{ALL_STEPPED}, {RESTARTS.name}"),)),
            (IN_PLACE, (Quantity("stepped", f"{ALL_STEPPED}, {IN_PLACE.name}", limit=0.3), BEYOND)),
        ):
            pairs = [Round(each[TORCHRUN.name], each[ours.name]) for each in rounds]
            findings.append(Finding(f"seconds after the death: {JOBS[job]}", quantities, pairs))
    report("heal", findings, machine_line, options)


if __name__ == "__main__":
    main()
