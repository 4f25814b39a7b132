"""The part `watched`: a training step of 10 ms with all monitoring on, beside the same with all of it off.

The method is that of bench/overhead.py: two jobs train in turns, and the launcher of the other one is stopped.
"""

from __future__ import annotations

import os
import subprocess
import sys

import gpu_part

sys.path.append(os.path.join(gpu_part.ROOT, "bench"))  # behind ours: a ddp.py is in it

from overhead import OFF, ON, TARGET, Job, Setting, measured

_STEP_S = 0.010
_LAUNCHES, _ROUNDS = (1, 2) if gpu_part.IS_REHEARSAL else (3, 8)
_CALIBRATE = (
    "import sys, torch; sys.path.insert(0, sys.argv[1]); import gpu_part; gpu_part.place(0, 0, 1); "
    "sys.path.insert(0, gpu_part.PROGRAMS); from watched_model import repeats_for; "
    "torch.set_num_threads(1); print(repeats_for(float(sys.argv[2]), torch.device(sys.argv[3])))"
)


class OnDevice(Job):
    def _command(self, asked: Setting) -> list[str]:
        program = os.path.join(gpu_part.PROGRAMS, "watched.py")
        words = ["-m", "launcher", "--standalone", *self._words(asked), program]
        return [sys.executable, *words, self._folder, asked.model, "off" if self.name == OFF else "on"]


def main() -> None:
    # A process of its own, since a context that stays would take its turns on the card.
    words = [os.path.dirname(gpu_part.PROGRAMS), str(_STEP_S), gpu_part.DEVICE]
    repeats = subprocess.run(
        [sys.executable, "-c", _CALIBRATE, *words], capture_output=True, text=True, check=True
    ).stdout.strip()
    name = f"our DDP, {gpu_part.BACKEND}, 1 rank"
    taken = measured(Setting(repeats, name, 1), _LAUNCHES, _ROUNDS, OnDevice).taken
    gpu_part.found(
        "comparison",
        table="watched",
        name=f"a step of {_STEP_S * 1e3:.0f} ms, {name}",
        unit="ms",
        theirs=[round(each * 1e3, 4) for each in taken[OFF]],
        ours=[round(each * 1e3, 4) for each in taken[ON]],
        target=TARGET,
    )


if __name__ == "__main__":
    main()
