"""The parts `launch`, `first-step`, `restart` and `heal`: ddp-launch and torchrun in turns, over contexts and NCCL.

gpu_launch.py launch|first-step|restart|heal
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass

import gpu_part

sys.path.append(os.path.join(gpu_part.ROOT, "bench"))  # behind ours: a ddp.py is in it

from sidebyside import Contender, Quantity, Round, Run, compare, play_all
from watched import WatchedRun

_PROGRAM = os.path.join(gpu_part.PROGRAMS, "first_step.py")
_HEALS = os.path.join(gpu_part.PROGRAMS, "heals.py")
_ROUNDS = 1 if gpu_part.IS_REHEARSAL else 3
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Module(Contender):
    """Started by this interpreter: a command of that name may belong to another one, or to none."""

    def argv(self, *args: str) -> list[str]:
        return [sys.executable, "-m", self.command, "--standalone", *args]


# Where torchrun keeps one store over restarts, keys of the first attempt disturb the second.
TORCHRUN = Module("torchrun", "torch.distributed.run", (("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),))
DDP_LAUNCH = Module("ddp-launch", "launcher")
# torch's DDP imports it in each rank of each generation; here it is imported once.
PRELOADS = Module("ddp-launch --preload torch._dynamo", "launcher")
IN_PLACE = Module("ddp-launch --recover in-place", "launcher")
CONTENDERS = {
    "launch": (TORCHRUN, DDP_LAUNCH),
    "first-step": (TORCHRUN, DDP_LAUNCH, PRELOADS),
    "restart": (TORCHRUN, DDP_LAUNCH, PRELOADS),
    "heal": (TORCHRUN, IN_PLACE),
}


def command(contender: Contender, ranks: int, how: str) -> list[str]:
    more = ("--preload", "torch._dynamo") if contender is PRELOADS else ()
    return contender.argv("--nproc-per-node", str(ranks), "--max-restarts", "3", *more, _PROGRAM, how)


def launch(contender: Contender, ranks: int) -> dict[str, float]:
    with WatchedRun(command(contender, ranks, "context"), dict(contender.env), _TIMEOUT_S) as run:
        cpu = run.finish()
        return {
            "torch": run.last("torch", ranks) - run.started,
            "context": run.last("context", ranks) - run.started,
            "exit": run.ended[run.pid] - run.started,
            "cpu": cpu,
        }


def first_step(contender: Contender, ranks: int) -> dict[str, float]:
    env = dict(contender.env) | gpu_part.sharing_env(ranks)
    with WatchedRun(command(contender, ranks, "step"), env, _TIMEOUT_S) as run:
        run.finish()
        return {name: run.last(name, ranks) - run.started for name in ("reduced", "step")}


def restart(contender: Contender, ranks: int) -> dict[str, float]:
    env = dict(contender.env) | gpu_part.sharing_env(ranks)
    with WatchedRun(command(contender, ranks, "dies"), env, _TIMEOUT_S) as run:
        run.until(lambda run: len(run.of("step")) == ranks)
        old = [stamp.pid for stamp in run.of("step")]
        for pid in old:
            run.watch(pid)
        run.open_gate(1)
        run.finish()
        killed = run.last("kill", 1)
        since = {name: run.last(name, ranks, attempt=1) - killed for name in ("line", "reduced", "step")}
        return {"gone": max(run.ended[pid] for pid in old) - killed} | since


def heal(contender: Contender, ranks: int) -> dict[str, float]:
    """A model is compiled: the caches of the compiler are warm, since the first attempt has filled them."""
    env = dict(contender.env) | gpu_part.sharing_env(ranks)
    how = ("--recover", "in-place") if contender is IN_PLACE else ()
    words = contender.argv("--nproc-per-node", str(ranks), "--max-restarts", "3", *how, _HEALS)
    with WatchedRun(words, env, 2 * _TIMEOUT_S) as run:
        run.until(lambda run: len(run.of("step")) == ranks)
        run.open_gate(1)
        run.until(lambda run: len(run.of("step", attempt=1)) == ranks)
        killed = run.last("kill", 1)
        others = [stamp.at for stamp in run.of("step", attempt=1) if stamp.rank < ranks - 1]
        return {"others": max(others) - killed, "step": run.last("step", ranks, attempt=1) - killed}


KINDS = {
    "launch": (
        launch,
        (
            Quantity("torch", "all ranks have torch imported"),
            Quantity("context", "all ranks have a context on the card", ratio=0.5),
            Quantity("exit", "command has exited"),
            Quantity("cpu", "CPU time, all processes"),
        ),
    ),
    "first-step": (
        first_step,
        (
            Quantity("reduced", "first all-reduce done"),
            Quantity("step", "first training step done"),
        ),
    ),
    "restart": (
        restart,
        (
            Quantity("gone", "all old ranks gone"),
            Quantity("line", "first line of the new attempt, last rank"),
            Quantity("reduced", "first all-reduce of the new attempt"),
            Quantity("step", "first training step of the new attempt", ratio=0.3),
        ),
    ),
    "heal": (
        heal,
        (
            Quantity("others", "the ranks that live have finished a step"),
            Quantity("step", "all ranks have finished a step"),
        ),
    ),
}


def main() -> None:
    kind = sys.argv[1]
    measure, quantities = KINDS[kind]
    ranks = 2 if gpu_part.IS_REHEARSAL else 8
    if kind != "launch":
        ranks = 1 if gpu_part.why_not_ranks(2) else 2
    if kind == "heal" and ranks == 1:
        gpu_part.not_run(gpu_part.why_not_ranks(2))
    played: list[dict[str, Run]] = []
    # Before the first of the parts a round fills the page cache.
    for number in range(-1 if kind == "launch" and not gpu_part.IS_REHEARSAL else 0, _ROUNDS):
        if played and time.monotonic() > gpu_part.DEADLINE:
            break
        found = play_all(lambda each: measure(each, ranks), CONTENDERS[kind], number)
        if number >= 0:
            played.append(found)
            report(kind, ranks, quantities, played)
    if not all(run.figures for runs in played for run in runs.values()):
        sys.exit("a run has no figure")


def report(kind: str, ranks: int, quantities: tuple[Quantity, ...], played: list[dict[str, Run]]) -> None:
    for contender in CONTENDERS[kind][1:]:
        pairs = [Round(runs[TORCHRUN.name], runs[contender.name]) for runs in played]
        whole = [each for each in pairs if each.ours.figures and each.theirs.figures]
        how = ", --preload torch._dynamo" if contender is PRELOADS else ""
        for quantity in quantities:
            row = compare(quantity, whole)
            gpu_part.found(
                "comparison",
                table=kind,
                name=f"{quantity.title}, {ranks} rank{'s' * (ranks > 1)}{how}",
                unit="s",
                theirs=[round(each, 4) for each in row.theirs],
                ours=[round(each, 4) for each in row.ours],
                target=quantity.ratio,
            )


if __name__ == "__main__":
    main()
