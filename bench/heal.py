"""How long training stands still when a rank dies: torchrun, ddp-launch with restarts, ddp-launch in place, in turns.

    python bench/heal.py [--rounds 5] [--deaths 5] [--train-for 8] [--json FILE] [--write-docs]

One node, two Gloo ranks. All run the same script, which trains with AdamW and keeps its state with `ddp.elastic`. The
last rank kills itself at some point of a step, in a job that has trained for some seconds, several times in each run.
Counted from the kill until all ranks have finished a training step: under torchrun and with `--recover restart` these
are new processes, in place all but one are the old ones.
"""

from __future__ import annotations

import os
import statistics
import time

from shown import machine, option_parser, report
from sidebyside import DDP_LAUNCH, Contender, Finding, Quantity, Round, play_all
from watched import RANK_SCRIPTS, WatchedRun

SCRIPT = os.path.join(RANK_SCRIPTS, "heals.py")
RANKS = 2
FRESH_STORE = (("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),)
TORCHRUN = Contender("torchrun", "torchrun", FRESH_STORE)
RESTARTS = Contender("restarts", DDP_LAUNCH.command)
IN_PLACE = Contender("in place", DDP_LAUNCH.command)
JOBS = {
    "MLP of 1M parameters, our DDP": ("mlp", "ours"),
    "MLP of 1M parameters, torch's DDP": ("mlp", "torch"),
    "GPT-like model of 5M parameters, our DDP": ("gpt", "ours"),
    "GPT-like model of 5M parameters, torch's DDP": ("gpt", "torch"),
    "MLP of 1M parameters, torch's DDP, compiled": ("mlp", "torch", "compile"),
}


def stands_still(
    contender: Contender, words: tuple[str, ...], deaths: int, train_for_s: float, timeout_s: float
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
        pauses = [
            run.last("stepped", RANKS, attempt + 1) - run.last("kill", 1, attempt)
            for attempt in range(deaths)
        ]
        return {"stepped": statistics.median(pauses)}


def main() -> None:
    parser = option_parser(__doc__ or "", rounds=5, timeout_s=60.0)
    parser.add_argument("--deaths", type=int, default=5, help="of one run (default 5)")
    parser.add_argument(
        "--train-for", type=float, default=8.0, help="seconds from the first step to the first death"
    )
    options = parser.parse_args()
    machine_line = machine()
    findings = []
    for title, words in JOBS.items():
        rounds = [
            play_all(
                lambda contender, words=words: stands_still(  # type: ignore[misc]
                    contender, words, options.deaths, options.train_for, options.timeout
                ),
                (TORCHRUN, RESTARTS, IN_PLACE),
                number,
            )
            for number in range(-options.warm_up, options.rounds)
        ][options.warm_up :]
        for ours, limit in ((RESTARTS, None), (IN_PLACE, 0.3)):
            quantity = Quantity("stepped", f"all ranks have finished a step, {ours.name}", limit=limit)
            pairs = [Round(each[TORCHRUN.name], each[ours.name]) for each in rounds]
            findings.append(Finding(f"seconds after the death: {title}", (quantity,), pairs))
    report("heal", findings, machine_line, options)


if __name__ == "__main__":
    main()
