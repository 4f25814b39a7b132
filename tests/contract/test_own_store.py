"""A script meets its peers as it always has: env://, tcp://, a store of its own at MASTER_ADDR:MASTER_PORT."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from side_by_side import PLAIN, WARM, ddp_launch, program

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

# Each way that leaves keys behind gets a job of its own: a second env:// group in the same job meets stale
# addresses in the same store, under torchrun as well.
_JOBS = [
    (WARM, ("positional", "keyword", "without_waiting", "as_store", "env")),
]
_NIGHTLY: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (PLAIN, ("env", "file")),
    (WARM, ("env", "file", "elsewhere")),
    (WARM, ("tcp",)),
    (PLAIN, ("positional",)),
    (PLAIN, ("keyword",)),
    (PLAIN, ("without_waiting",)),
    (PLAIN, ("as_store",)),
    (PLAIN, ("tcp",)),
]


_CLIENT = """
import os
import torch.distributed as dist
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
store.set(os.environ["RANK"], "here")
store.wait(["0", "1"])
print("found", flush=True)
if os.environ["RANK"] == "0":
    os._exit(0)
"""


@pytest.mark.nightly(instead=("::test_ranks_meet", "shell/test_keepers.py"))
def test_a_program_without_a_warm_start_finds_the_store(tmp_path: Path) -> None:
    """Before any process group, and without our import hook. It stays when rank 0 leaves."""
    (tmp_path / "train.py").write_text(_CLIENT)
    words = (sys.executable, "train.py")
    ended = ddp_launch(*words, cwd=tmp_path, nproc=2, options=("--no-python",)).ok()
    assert ended.out.splitlines() == ["found", "found"]


def _named(job: tuple[tuple[str, ...], tuple[str, ...]]) -> str:
    return "-".join(("plain" if job[0] else "warm", *job[1]))


_MEETS = """
import os, sys
import torch.distributed as dist
dist.init_process_group("gloo", init_method=sys.argv[1], rank=int(os.environ["RANK"]), world_size=2)
dist.barrier()
print("met")
"""


@pytest.mark.parametrize(
    "options", [pytest.param(WARM, id="warm"), pytest.param(PLAIN, id="plain", marks=pytest.mark.nightly)]
)
def test_a_file_is_removed_when_all_ranks_have_ended(options: Sequence[str], tmp_path: Path) -> None:
    """Otherwise the next job with this file would find the addresses of these ranks."""
    path = tmp_path / "meeting"
    (tmp_path / "train.py").write_text(_MEETS)
    ended = ddp_launch("train.py", f"file://{path}", cwd=tmp_path, nproc=2, options=options).ok()
    assert ended.out.splitlines() == ["met", "met"]
    assert not path.exists()


@pytest.mark.parametrize(
    ("options", "ways"),
    [
        *(pytest.param(*job, id=_named(job)) for job in _JOBS),
        *(pytest.param(*job, id=_named(job), marks=pytest.mark.nightly) for job in _NIGHTLY),
    ],
)
def test_ranks_meet(options: Sequence[str], ways: Sequence[str], tmp_path: Path) -> None:
    program("stores.py", tmp_path)
    env = {"STORE_FILE": str(tmp_path / "store")}
    ended = ddp_launch("stores.py", *ways, cwd=tmp_path, nproc=2, options=options, env=env).ok()
    assert sorted(ended.out.splitlines()) == sorted(f"{way} met {rank}" for way in ways for rank in (0, 1))
