"""Ranks get torchrun's environment, to the letter but for what names this very run; ours is all under DDP_*."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from recordings import ENVIRONMENTS, answer, variables
from side_by_side import PLAIN, WARM, ddp_launch, program, python, script, written

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_OURS = (
    "DDP_CHECKPOINT_REQUEST",
    "DDP_GENERATION",
    "DDP_GUARD",
    "DDP_JOB_ID",
    "DDP_RANK_DIR",
    "DDP_RESTART_COUNT",
    "DDP_SCRATCH",
    "DDP_STATUS_PAGE",
)


# What ranks are given does not depend on how they are started; where it could, both are looked at.
@pytest.mark.parametrize(
    ("which", "options"),
    [("one rank", PLAIN), ("two ranks", WARM), ("two ranks", PLAIN), ("presets", WARM)],
    ids=lambda value: value if isinstance(value, str) else "plain" if value else "warm",
)
def test_as_under_torchrun(which: str, options: tuple[str, ...], tmp_path: Path) -> None:
    nproc, _, shared, env = ENVIRONMENTS[which]
    program("main_facts.py", tmp_path)
    python("main_facts.py", "python", cwd=tmp_path, env=env).ok()
    ddp_launch("main_facts.py", "ours", cwd=tmp_path, nproc=nproc, options=options + shared, env=env).ok()
    for rank, torchruns in enumerate(answer(f"environment, {which}")):
        found: dict[str, str] = written(tmp_path, "ours", rank)["environment"]
        assert sorted(name for name in found if name.startswith("DDP_")) == list(_OURS)
        ours = variables(found, written(tmp_path, "python")["environment"])
        assert ours == torchruns


@pytest.mark.parametrize("options", [WARM, PLAIN], ids=["warm", "plain"])
def test_hash_seed_is_honoured(options: Sequence[str], light: dict[str, str], tmp_path: Path) -> None:
    script(tmp_path, "print(hash('a'))\n")
    env = light | {"PYTHONHASHSEED": "0"}
    expected = python("train.py", cwd=tmp_path, env=env).ok().out
    assert ddp_launch("train.py", cwd=tmp_path, options=options, env=env).ok().out == expected


_INHERITED = """
import json, os, sys
names = ("Umask", "SigBlk", "Cpus_allowed_list", "CapEff", "CapInh", "CapAmb", "NoNewPrivs", "Groups", "Uid", "Gid")
status = dict(line[:-1].split(":\\t", 1) for line in open("/proc/self/status") if ":\\t" in line)
facts = {name: status.get(name) for name in names}
for name in ("limits", "oom_score_adj", "coredump_filter", "timerslack_ns"):
    facts[name] = open(f"/proc/self/{name}").read()
facts |= {"nice": os.nice(0), "policy": os.sched_getscheduler(0), "cwd": os.getcwd()}
facts["threads"] = len(os.listdir("/proc/self/task"))
with open(f"{sys.argv[1]}.{os.environ.get('RANK', 0)}.json", "w") as file:
    json.dump(facts, file)
"""


@pytest.mark.parametrize("options", [PLAIN, WARM], ids=["plain", "warm"])
def test_what_a_process_inherits_passes_through_the_launcher(
    options: tuple[str, ...], light: dict[str, str], tmp_path: Path
) -> None:
    """Limits, umask, priority, CPUs, rights: those of the command, as under torchrun, which sets none of them."""
    name = script(tmp_path, _INHERITED).name
    python(name, "alone", cwd=tmp_path).ok()
    ddp_launch(name, "ours", cwd=tmp_path, nproc=2, options=options, env=light).ok()
    alone = written(tmp_path, "alone")
    assert [written(tmp_path, "ours", rank) for rank in (0, 1)] == [alone, alone]
