"""The zygote imports torch._dynamo and ddp when its ranks do, and a fork inherits them as if it had imported them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from launched import Launch

ROOT = Path(__file__).resolve().parents[2]
# Two ranks import a small torch._dynamo; then the zygote may. `rank_N` is what rank N does before.
LEARNS = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from launcher.template import learning
learning._SPARE_BYTES = 0
mine = learning.Learner()
for rank, text in enumerate(sys.argv[2:]):
    notes = mine.rank_starts(rank)
    pid = os.fork()
    if pid == 0:
        notes.begin()
        exec(text)
        os._exit(0)
    os.waitpid(pid, 0)
before = dict(os.environ)
passed_on = [*mine.turn(), *mine.turn()]
mine.learn_beforehand(["torch._dynamo"])  # not with ranks
learned = sys.modules.get("torch._dynamo")
assert dict(os.environ) == before
print(json.dumps([learned is not None, getattr(learned, "VALUE", None), "somebody" in sys.modules, passed_on]))
"""
SMALL = """
import os
VALUE = os.environ.get("FLAG")
os.environ["ADDED"] = "by the import"
"""
IMPORTS = "import torch._dynamo, somebody"
STANDS_BY = """
import os, sys
sys.path.insert(0, sys.argv[1])
from launcher.template import learning
learning._SPARE_BYTES = 0
learning.Learner().learn_beforehand(["somebody", "torch._dynamo"])
assert "somebody" not in sys.modules and "torch._dynamo" in sys.modules
assert "ADDED" not in os.environ
"""


def prepared(folder: Path) -> dict[str, str]:
    (folder / "torch").mkdir()
    (folder / "torch/__init__.py").write_text("")
    (folder / "torch/_dynamo.py").write_text(SMALL)
    (folder / "somebody.py").write_text("")
    return os.environ | {"PYTHONPATH": str(folder)}


def learned(
    folder: Path, *ranks: str, env: dict[str, str] | None = None, passes_on: bool = False
) -> tuple[bool, str | None]:
    words = [sys.executable, "-c", LEARNS, str(ROOT), *ranks]
    env = prepared(folder) | (env or {})
    done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    is_there, value, is_somebody_there, passed_on = json.loads(done.stdout)
    assert passed_on == ["torch._dynamo"] * passes_on
    assert not is_somebody_there, "only torch and ddp are known"
    return is_there, value


def test_what_all_ranks_import_is_imported_under_their_variables(tmp_path: Path) -> None:
    rank = f"os.environ['FLAG'] = 'of the script'\n{IMPORTS}\nos.environ['FLAG'] = 'later'"
    assert learned(tmp_path, rank, rank) == (True, "of the script")


def test_what_is_imported_without_changed_variables_is_passed_on_to_nodes_that_stand_by(
    tmp_path: Path,
) -> None:
    assert learned(tmp_path, IMPORTS, IMPORTS, passes_on=True) == (True, None)
    words = [sys.executable, "-c", STANDS_BY, str(ROOT)]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_variable_that_the_ranks_have_removed(tmp_path: Path) -> None:
    rank = f"del os.environ['FLAG']\n{IMPORTS}"
    assert learned(tmp_path, rank, rank, env={"FLAG": "1"}) == (True, None)


def test_a_script_that_replaces_how_json_is_written(tmp_path: Path) -> None:
    """The zygote ended at what it read, and the whole job with it."""
    rank = f"json.dumps = lambda *args, **named: '{{}}'\n{IMPORTS}"
    assert learned(tmp_path, rank, rank, passes_on=True) == (True, None)


def test_a_script_that_replaces_it_deeper(tmp_path: Path) -> None:
    rank = f"json.JSONEncoder.encode = lambda self, value: '{{}}'\n{IMPORTS}"
    assert learned(tmp_path, rank, rank) == (False, None)


@pytest.mark.parametrize(
    "other",
    ["pass", f"os.environ['FLAG'] = 'another'\n{IMPORTS}", f"os.chdir('/')\n{IMPORTS}"],
    ids=["does not", "under other variables", "in another folder"],
)
def test_what_one_rank_imports_otherwise_is_not(tmp_path: Path, other: str) -> None:
    assert learned(tmp_path, IMPORTS, other) == (False, None)


def test_the_folder_of_the_script_is_another_one(tmp_path: Path) -> None:
    """As hydra does: torch._dynamo keeps its name."""
    rank = f"os.chdir('/')\n{IMPORTS}"
    assert learned(tmp_path, rank, rank) == (False, None)


def test_a_process_that_a_rank_has_forked_notes_nothing(tmp_path: Path) -> None:
    rank = f"if os.fork() == 0:\n    {IMPORTS}\n    os._exit(0)\nos.wait()"
    assert learned(tmp_path, rank, rank) == (False, None)


# What a fork would not inherit, or share, with the real modules of this release of torch.
INHERITED = """
import json, os, random, signal, sys, tempfile, threading
sys.path.insert(0, sys.argv[1])
import torch
from launcher.template import learning
learning._SPARE_BYTES = 0

def state():
    handlers = [signal.getsignal(each) for each in signal.valid_signals()]
    opened = sorted(os.listdir("/proc/self/fd"))
    tasks, own = os.listdir("/proc/self/task"), random.getstate()
    return tuple(map(str, (dict(os.environ), os.getcwd(), sys.path, sys.meta_path, handlers, opened, len(tasks),
        threading.active_count(), tempfile.tempdir, own, sys.excepthook, os.umask(0o22),
        torch.get_default_dtype(), torch.get_num_threads())))

mine = learning.Learner()
mine.rank_starts(0)
before = state()
for name in ("torch._dynamo", "ddp", "ddp.reducer.module", "ddp.elastic"):
    mine._learn(learning.Noted(name, {}, os.getcwd()))
    assert name in sys.modules, name
after = state()
assert after == before, [pair for pair in zip(before, after) if pair[0] != pair[1]]
import torch.random
from sympy.core import random as of_sympy
first = of_sympy.rng.getstate()
mine.rank_starts(0).begin()
assert of_sympy.rng.getstate() != first, "each rank draws numbers of its own"
"""


@pytest.mark.nightly(instead="::test_what_all_ranks_import_is_imported_under_their_variables")
def test_a_fork_can_inherit_what_is_known() -> None:
    words = [sys.executable, "-c", INHERITED, str(ROOT)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


DIES_AT_ONCE = """
import os, sys, time
is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
import torch
print(os.environ["TORCHELASTIC_RESTART_COUNT"], "torch._dynamo" in sys.modules, flush=True)
parameter = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.AdamW([parameter])
parameter.sum().backward()
optimizer.step()
if is_first:
    open(f"{sys.argv[1]}-{os.environ['RANK']}", "w").close()
    while not all(os.path.exists(f"{sys.argv[1]}-{rank}") for rank in "01"):
        time.sleep(0.02)
    if os.environ["RANK"] == "1":
        sys.exit(3)
    time.sleep(600)
"""


@pytest.mark.nightly(instead="::test_what_all_ranks_import_is_imported_under_their_variables")
def test_a_death_in_the_first_step_repeats_no_import(launch: Launch, tmp_path: Path) -> None:
    words = ("--nproc-per-node", "2", "--max-restarts", "1", "SCRIPT", str(tmp_path / "stepped"))
    job = launch(*words, source=DIES_AT_ONCE, fake_torch=None)
    assert job.wait(120.0) == 0, job.stderr()
    said = sorted(line.partition("] ")[2] for line in job.stdout().splitlines())
    assert said == ["0 False", "0 False", "1 True", "1 True"], job.stderr()


NOTES = """
import os
VALUE = os.environ.get("FLAG")
with open(os.environ["IMPORTED"], "a") as file:
    file.write("imported\\n")
"""
FAILS_ONCE = """
import os, sys, time
restart, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
print(restart, "noting" in sys.modules, os.environ.get("FLAG"), flush=True)
os.environ["FLAG"] = "from the script"
import noting
import wave  # where a module came from is recorded when the next one is imported
print(restart, noting.VALUE, flush=True)
open(f"{os.environ['IMPORTED']}.said-{rank}", "w").close()
if restart == "0":
    while len(open(os.environ["IMPORTED"]).readlines()) < 2:  # the two ranks
        time.sleep(0.02)
    while not os.path.exists(os.environ["IMPORTED"] + ".said-0"):  # it is not to be stopped before
        time.sleep(0.02)
    if rank == "1":
        sys.exit(3)
    time.sleep(600)
"""


@pytest.mark.parametrize("words", [(), ("--no-learn-imports",)], ids=["on", "off"])
def test_a_module_of_somebody_else_is_not_learned(
    launch: Launch, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """It may keep what the script had changed before, or what each rank needs for itself."""
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "noting.py").write_text(NOTES)
    env = {"PYTHONPATH": str(site), "IMPORTED": str(tmp_path / "imported")}
    job = launch(
        "--nproc-per-node", "2", "--max-restarts", "1", *words, source=FAILS_ONCE, env=env, fake_torch=""
    )
    assert job.wait() == 0, job.stderr()
    said = sorted(line.partition("] ")[2] for line in job.stdout().splitlines())
    assert said == [
        *["0 False None"] * 2,
        *["0 from the script"] * 2,
        *["1 False None"] * 2,
        *["1 from the script"] * 2,
    ]
    assert (tmp_path / "imported").read_text().count("imported") == 4, "by the ranks of two generations alone"


# What torch._dynamo and torch._inductor have read from the environment, before and after a restart.
CONFIGURED = """
import os, sys, time
import torch
os.environ["TORCH" + "DYNAMO_REPRO_LEVEL"] = "3"  # seen in the source, they would prevent the fork
os.environ["TORCH" + "INDUCTOR_MAX_AUTOTUNE"] = "1"
before = "torch._dynamo" in sys.modules
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
import torch._dynamo.config, torch._inductor.config, wave
configs = {m.__name__: m.get_config_copy() for m in (torch._dynamo.config, torch._inductor.config)}
print(os.environ["TORCHELASTIC_RESTART_COUNT"], before, repr(configs), flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "1":
        sys.exit(3)
    time.sleep(600)
"""


@pytest.mark.nightly(instead="::test_what_all_ranks_import_is_imported_under_their_variables")
def test_torch_has_the_same_configuration_as_before_the_restart(launch: Launch) -> None:
    words = ("--nproc-per-node", "2", "--max-restarts", "1")
    job = launch(*words, source=CONFIGURED, fake_torch=None)
    assert job.wait(300.0) == 0, job.stderr()
    said = [line.partition("] ")[2].split(" ", 2) for line in job.stdout().splitlines()]
    assert sorted(line[:2] for line in said) == [["0", "False"]] * 2 + [["1", "True"]] * 2, job.stderr()
    assert len({configuration for _restart, _before, configuration in said}) == 1
    assert "'repro_level': 3" in said[0][2]
    assert "'max_autotune': True" in said[0][2]
