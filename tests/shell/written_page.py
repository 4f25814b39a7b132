"""Writes the status page of a rank by a program, and reads it as the agent does."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from rendezvous.values.rank_view import NO_REPEAT

if TYPE_CHECKING:
    from launcher.health.pages import Pages
    from rendezvous.values.rank_view import RankView, Repeat

ROOT = Path(__file__).resolve().parents[2]


def written(
    pages: Pages, head: str, program: str, repeat: Repeat = NO_REPEAT, exit_code: int = 0
) -> RankView:
    """Run the program to its end as rank 5. Return what is on its page then."""
    env = dict(os.environ) | pages.open(0, 5, repeat)
    done = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(program)],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == exit_code, done.stderr
    view = pages.ended(0)
    assert view is not None
    return view
