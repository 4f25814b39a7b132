"""A script meets its peers as it always has: env://, tcp://, a store of its own at MASTER_ADDR:MASTER_PORT."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from side_by_side import PLAIN, WARM, ddp_launch, program

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

# Each way that leaves keys behind gets a job of its own: a second env:// group in the same job meets stale
# addresses in the same store, under torchrun as well.
_WARM_JOBS: list[tuple[str, ...]] = [
    ("positional", "keyword", "without_waiting", "as_store", "env"),
    ("env", "file", "elsewhere"),
    ("tcp",),
]
_PLAIN_JOBS: list[tuple[str, ...]] = [
    ("positional",),
    ("keyword",),
    ("without_waiting",),
    ("as_store",),
    ("env", "file"),
    ("tcp",),
]
_JOBS = [(WARM, job) for job in _WARM_JOBS] + [(PLAIN, job) for job in _PLAIN_JOBS]


@pytest.mark.parametrize(("options", "ways"), _JOBS, ids=lambda value: "-".join(value) or "warm")
def test_ranks_meet(options: Sequence[str], ways: Sequence[str], tmp_path: Path) -> None:
    program("stores.py", tmp_path)
    env = {"STORE_FILE": str(tmp_path / "store")}
    ended = ddp_launch("stores.py", *ways, cwd=tmp_path, nproc=2, options=options, env=env).ok()
    assert sorted(ended.out.splitlines()) == sorted(f"{way} met {rank}" for way in ways for rank in (0, 1))
