"""The progress line of a job whose ranks train, below the bars of all of them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from seen import kind_of_terminal, on_terminal, seen

if TYPE_CHECKING:
    from launched import Launch
    from seen import SeenTerminal

__all__ = ["kind_of_terminal", "seen"]

_TRAINS = """
import os, time
from tqdm import tqdm
from ddp import status
from ddp.telemetry import status_page as s
page, finish = s.page(), os.path.join(os.environ["THERE"], "finish")
page.phase(s.IDLE)
with tqdm(total=100_000, desc="train " + os.environ["RANK"]) as bar:
    for step in range(100_000):
        page.mark(s.FORWARD)
        time.sleep(0.02)
        page.mark(s.OPTIMIZER)
        page.step()
        status("training", total=100_000)
        bar.update()
        if os.path.exists(finish):
            break
"""


def test_it_shows_step_rate_and_time_left_below_the_bars_of_all_ranks(
    seen: SeenTerminal, launch: Launch
) -> None:
    words = ("--nproc-per-node", "2", "--bars", "all", "--log-prefix", "[{rank}] ")
    job = launch(*words, source=_TRAINS, fake_torch="", **on_terminal(seen))
    seen.forget_slave()

    def bars_and_steps() -> bool:
        below = seen.rows[-3:]
        are_apart = [row.split(":")[0] for row in below[:2]] == ["[0] train 0", "[1] train 1"]
        return are_apart and bool(
            re.search(r"\| step \d+ of 100000, [\d.]+ steps/s, [\d:]+ left \|", below[-1])
        )

    seen.wait_until(bars_and_steps)
    (job.there / "finish").touch()
    assert job.wait() == 0
    rows = seen.end()
    assert sum(row.startswith("[0] train 0:") for row in rows) == 1
    assert sum(row.startswith("[1] train 1:") for row in rows) == 1
