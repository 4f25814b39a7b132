"""Two ranks with the emulated accelerator, for all tests of this folder; skipped where it cannot be compiled.

Only the ranks import `emu`: a process has one accelerator, and other tests of this process are to have none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import emu_build
import pytest
from ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    try:
        emu_build.built()
    except emu_build.CannotBuild as why:
        pytest.skip(str(why))
    ranks = Ranks(2, "cpu:gloo,emu:eccl", "emu")
    yield ranks
    ranks.close()
