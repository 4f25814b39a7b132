"""The zygote learns what the ranks import: only what a fork inherits as if the rank had imported it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ddp.telemetry import page_layout, page_writer
from launcher.health import page
from launcher.template import first_step
from launcher.template.learner import Learner

if TYPE_CHECKING:
    from launched import Launch

ROOT = Path(__file__).resolve().parents[2]
# One rank records the imports of SCRIPT; a learner follows. The last line says what it has learned.
LEARNS = """
import json, os, select, sys, time
sys.path.insert(0, sys.argv[1])
import random  # the zygote has it with torch
from launcher.template import learner
learner._QUIET_S = learner._LOOK_S = 0.0
learner._SPARE_BYTES = 0
learner.may_learn = lambda name: True  # the other rules are tested with small modules
told = []
mine = learner.Learner(lambda: None, told.append)
mine.record_rank(0, {"RANK": "0"})
pid = os.fork()
if pid == 0:
    mine.recorder(0).install()
    exec(sys.argv[2])
    os._exit(0)
os.waitpid(pid, 0)
# what happens before
for _ in range(2 * len(sys.argv[2])):
    if mine.trial is not None:
        select.select([mine.trial], [], [])
        mine.read_report()
    else:
        mine.turn()
mine.recorder(0)  # what a rank does first
report = told[0] if told else None
values = {name: getattr(sys.modules[name], "VALUE", None) for name in sys.modules if name.startswith("m_")}
print(json.dumps([report and report.imported, report and dict(report.left_out), values, os.environ.get("ADDED")]))
"""
REFUSED = {
    "m_thread": (
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
        "it starts a thread",
    ),
    "m_file": ("FILE = open(__file__)", "it leaves a file or socket open"),
    "m_socket": ("import socket\nSOCKET = socket.socket()", "it leaves a file or socket open"),
    "m_handler": (
        "import signal\nsignal.signal(signal.SIGUSR1, signal.SIG_IGN)",
        "it sets a signal handler",
    ),
    "m_path": ("import sys\nsys.path.append('/nowhere')", "it changes sys.path"),
    "m_folder": ("import os\nos.chdir('/')", "it changes the current folder"),
    "m_draws": ("import random\nVALUE = random.random()", "it uses random numbers"),
    "m_uuid": ("import uuid\nVALUE = str(uuid.uuid4())", "it reads a random number"),
    "m_pid": ("import os\nVALUE = os.getpid()", "it reads its process number"),
    "m_time": ("import time\nVALUE = time.time()", "it reads the time"),
    "m_rank": ("import os\nVALUE = os.environ.get('RANK')", "it reads the variable RANK"),
    "m_all": ("import os\nVALUE = dict(os.environ)", "it reads all environment variables"),
    "m_sets": ("import os\nos.environ['HOME'] = '/'", "it changes the variable HOME"),
    "m_prints": ("print('hello')", "it writes to standard output or error"),
    "m_native": ("import os\nos.write(2, b'hello')", "it writes to standard output or error"),
    "m_main": (
        "import __main__\nVALUE = getattr(__main__, 'not_yet', 0)",
        "it looks at the script (not_yet)",
    ),
    "m_plugin": (
        "try:\n    import own_plugin\nexcept ImportError:\n    pass",
        "it imports own_plugin, which is not an installed package",
    ),
    "m_exits": ("import os, sys\nif not hasattr(sys, 'is_rank'): os._exit(3)", "its import ends the process"),
    "m_fails": (
        "import sys\nif not hasattr(sys, 'is_rank'): raise OSError('no')",
        "its import fails (OSError: no)",
    ),
}
ACCEPTED = {
    "m_plain": "VALUE = 1",
    "m_flag": "import os\nVALUE = os.environ.get('FLAG')",
    "m_gone": "import os\nVALUE = 'GONE' in os.environ",
    "m_adds": "import os\nos.environ.setdefault('ADDED', 'yes')",
    "m_optional": "try:\n    import not_installed\nexcept ImportError:\n    VALUE = 'without'",
}


def learned(
    folder: Path, modules: dict[str, str], script: str, before: str = ""
) -> tuple[list[str], dict[str, str], dict[str, object], str]:
    site = folder / "site-packages"
    site.mkdir()
    for name, text in modules.items():
        (site / f"{name}.py").write_text(text + "\n")
    (folder / "own_plugin.py").write_text("")
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(site), str(folder))), "GONE": "1"}
    program = LEARNS.replace("# what happens before\n", before)
    words = [sys.executable, "-c", program, str(ROOT), script]
    done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    imported, left_out, values, added = json.loads(done.stdout.splitlines()[-1])
    return imported or [], left_out or {}, values, added


def test_what_a_fork_would_not_inherit_is_left_out(tmp_path: Path) -> None:
    modules = {name: text for name, (text, _reason) in REFUSED.items()}
    script = "import sys; sys.is_rank = True\n" + "".join(
        f"import {name}\n" for name in (*modules, "wave", "colorsys")
    )
    imported, left_out, values, _added = learned(tmp_path, modules, script)
    assert left_out == {name: reason for name, (_text, reason) in REFUSED.items()}
    assert not values
    assert not any(name.startswith("m_") for name in imported)


def test_the_rest_is_imported_under_the_variables_that_the_script_had_set(tmp_path: Path) -> None:
    script = "import os, m_plain\nos.environ['FLAG'] = 'set by the script'\ndel os.environ['GONE']\n"
    script += "".join(f"import {name}\n" for name in (*ACCEPTED, "wave", "colorsys"))
    imported, left_out, values, added = learned(tmp_path, ACCEPTED, script)
    assert not left_out
    assert imported == [*ACCEPTED, "wave"]
    assert values == {
        "m_plain": 1,
        "m_flag": "set by the script",
        "m_gone": False,
        "m_adds": None,
        "m_optional": "without",
    }
    assert added == "yes"


def test_a_variable_that_the_script_changes_afterwards(tmp_path: Path) -> None:
    modules = {"m_reads": ACCEPTED["m_flag"], "m_other": "VALUE = 1"}
    script = "import os\nos.environ['FLAG'] = '1'\nimport m_reads\nos.environ['FLAG'] = '2'\n"
    script += "import m_other, wave, colorsys"
    imported, left_out, _values, _added = learned(tmp_path, modules, script)
    assert (imported, left_out) == (["m_other", "wave"], {"m_reads": "it reads the variable FLAG"})


def test_a_round_that_a_failure_breaks_off_is_begun_again(tmp_path: Path) -> None:
    breaks_off = """
for _ in range(5):
    for _turn in range(3):  # see what there is, begin, try
        mine.turn()
    assert mine.trial is not None
    shared = dict(mine._shared)
    mine.rank_ended(0)
    assert mine.wait_s() is None
    mine.record_rank(0, {"RANK": "0"})
    mine._shared.update(shared)  # the next generation imports the same
    mine._quiet = learner._Quiet({0: shared[0].find(bytes(1))}, 0.0, 0.0)
"""
    imported, left_out, _values, _added = learned(
        tmp_path, {"m_plain": "VALUE = 1"}, "import m_plain, wave, colorsys", before=breaks_off
    )
    assert (imported, left_out) == (["m_plain", "wave"], {})


def test_nobody_waits_for_a_trial_that_is_broken_off(tmp_path: Path) -> None:
    """A sweep ends it, and ranks wait for the end of the sweep. Later the same is tried again."""
    breaks_off = """
for _turn in range(3):  # see what there is, begin, try
    mine.turn()
assert mine.trial is not None
mine.stop()
assert (mine.trial, mine.n_trials) == (None, 1)
mine.reaped(os.waitpid(-1, 0)[0])
assert mine.n_trials == 0
"""
    imported, left_out, _values, _added = learned(
        tmp_path, {"m_plain": "VALUE = 1"}, "import m_plain, wave, colorsys", before=breaks_off
    )
    assert (imported, left_out) == (["m_plain", "wave"], {})


def test_our_own_library_passes_the_trial(tmp_path: Path) -> None:
    """A rank that heals a job waits for few things longer than for its imports."""
    before = "import torch, torch.distributed\nmine._of_each_rank.update(['DDP_JOINS', 'DDP_GUARD', 'DDP_BACKEND'])\n"
    script = "import ddp\nddp.init, ddp.elastic, ddp.DistributedDataParallel\nimport wave, colorsys"
    imported, left_out, _values, _added = learned(tmp_path, {}, script, before=before)
    assert not left_out
    assert {"ddp", "ddp.groups.process_group", "ddp.elastic", "ddp.wrapper", "wave"} <= set(imported)


def test_a_heal_keeps_what_the_ranks_that_continue_have_recorded() -> None:
    """Otherwise the zygote would import what only the new rank imports."""
    mine = Learner(lambda: None, lambda _report: None)
    for local_rank in (0, 1):
        mine.record_rank(local_rank, {"RANK": str(local_rank)})
    kept = mine._shared[1]
    mine.rank_ended(0)
    assert mine.wait_s() is None  # nothing is learned from a part of the world
    mine.record_rank(0, {"RANK": "0"})
    assert mine.wait_s() is not None
    assert sorted(mine._shared) == [0, 1]
    assert mine._shared[1] is kept


def test_learning_waits_less_for_ranks_that_have_finished_a_step(tmp_path: Path) -> None:
    """Then they have imported what a step needs, and a failure would repeat the imports."""
    mine = Learner(lambda: None, lambda _report: None)
    pages = []
    for local_rank in (0, 1):
        path = tmp_path / f"page-{local_rank}"
        path.write_bytes(page.header(0).ljust(page.SIZE, b"\0"))
        with path.open("r+b") as file:
            pages.append(page_writer.Page(file.fileno()))
        mine.record_rank(local_rank, {first_step.PAGE_VARIABLE: str(path)})
    mine._quiet = mine._quiet._replace(since=mine._started_at + 1.25)
    pages[0].step()
    assert mine._quiet_s() == 3.0
    pages[1].phase(page_layout.BACKWARD)
    assert mine._quiet_s() == 3.0
    pages[1].step()
    assert mine._quiet_s() == pytest.approx(1.25)
    mine.record_rank(0, {})  # no page
    assert mine._quiet_s() == 3.0


def test_each_rank_gets_its_own_seed(tmp_path: Path) -> None:
    text = """
import random
own, fixed = random.Random(), random.Random(7)
first, of_fixed = own.getstate(), fixed.getstate()
"""
    modules = {"m_seeded": text, "m_last": "VALUE = 1"}
    script = "import m_seeded, m_last, wave"
    compare = "import m_seeded as m; print([m.own.getstate() == m.first, m.fixed.getstate() == m.of_fixed])"
    site = tmp_path / "site-packages"
    site.mkdir()
    for name, source in modules.items():
        (site / f"{name}.py").write_text(source)
    words = [sys.executable, "-c", LEARNS + compare, str(ROOT), script]
    env = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "[False, True]", done.stdout


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
before = "torch._dynamo" in sys.modules
os.environ["TORCHDYNAMO_REPRO_LEVEL"] = "3"
os.environ["TORCHINDUCTOR_MAX_AUTOTUNE"] = "1"
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
import torch._dynamo.config, torch._inductor.config, wave
configs = {m.__name__: m.get_config_copy() for m in (torch._dynamo.config, torch._inductor.config)}
print(os.environ["TORCHELASTIC_RESTART_COUNT"], before, repr(configs), flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(20)  # nothing in a rank shows when the zygote has learned
    if os.environ["RANK"] == "1":
        sys.exit(3)
    time.sleep(600)
"""


@pytest.mark.nightly
def test_torch_has_the_same_configuration_as_before_the_restart(launch: Launch) -> None:
    words = ("--nproc-per-node", "2", "--max-restarts", "1")
    job = launch(*words, source=CONFIGURED, fake_torch=None)
    assert job.wait(300.0) == 0, job.stderr()
    said = [line.partition("] ")[2].split(" ", 2) for line in job.stdout().splitlines()]
    assert sorted(line[:2] for line in said) == [["0", "False"]] * 2 + [["1", "True"]] * 2, job.stderr()
    assert len({configuration for _restart, _before, configuration in said}) == 1
    assert "'repro_level': 3" in said[0][2]
    assert "'max_autotune': True" in said[0][2]
