"""What may happen to a rank."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trial import Trial


def dies(trial: Trial) -> None:
    if trial.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def waits_for_ever(trial: Trial) -> None:
    if trial.rank == 0:
        threading.Event().wait()


def raises_on_one_rank(trial: Trial) -> None:
    if trial.rank == 1:
        raise ValueError("on one rank")
