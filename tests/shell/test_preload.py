"""Modules that are imported once, in the process that ranks are forked from."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from launched import Launch, Launched

NOT_WARM = "warm start is not possible"
HEAVY = """
import os
with open(os.environ["IMPORTED"], "a") as file:
    file.write(f"{os.getpid()}\\n")
"""
FAILS_ONCE = """
import os, sys, time
print("heavy.part" in sys.modules, flush=True)  # as in a new interpreter
import heavy.part
restart, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
said = os.environ["IMPORTED"] + ".said"
if rank == "0":
    open(said, "w").close()
elif restart == "0":
    while not os.path.exists(said):  # the first rank is not to be stopped before it has said its word
        time.sleep(0.01)
    sys.exit(3)
"""


def launched(
    launch: Launch,
    folder: Path,
    modules: dict[str, str],
    *words: str,
    source: str,
    fake_torch: str | None = "",
) -> Launched:
    for path, text in modules.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    env = {"PYTHONPATH": str(folder), "IMPORTED": str(folder / "imported")}
    return launch(
        "--nproc-per-node", "2", "--max-restarts", "1", *words, source=source, env=env, fake_torch=fake_torch
    )


def test_it_is_imported_once_for_all_ranks_of_all_generations(launch: Launch, tmp_path: Path) -> None:
    modules = {"heavy/__init__.py": "", "heavy/part.py": HEAVY}
    job = launched(launch, tmp_path, modules, "--preload", "json,heavy.part", source=FAILS_ONCE)
    assert job.wait() == 0, job.stderr()
    assert [line.partition("] ")[2] for line in job.stdout().splitlines()] == ["False"] * 4
    assert len((tmp_path / "imported").read_text().splitlines()) == 1
    assert NOT_WARM not in job.stderr()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import not_there", "(ModuleNotFoundError: No module named 'not_there')"),
        ("raise SystemExit(3)", "heavy (--preload) cannot be imported (SystemExit: 3)"),
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
            "a thread",
        ),
    ],
    ids=["missing", "exits", "thread"],
)
def test_what_cannot_be_is_told_and_ranks_start_plainly(
    launch: Launch, tmp_path: Path, text: str, words: str
) -> None:
    job = launched(launch, tmp_path, {"heavy.py": text}, "--preload", "heavy", source="print('trained')")
    assert job.wait() == 0, job.stderr()
    assert job.stdout().count("trained") == 2
    assert f"{NOT_WARM} (heavy (--preload) " in job.stderr()
    assert words in job.stderr()


@pytest.mark.nightly(instead="::test_it_is_imported_once_for_all_ranks_of_all_generations")
def test_a_first_step_does_not_import_what_was_preloaded(launch: Launch, tmp_path: Path) -> None:
    source = (
        "import sys, torch\n"
        "before = 'torch._dynamo' in sys.modules\n"
        "model = torch.nn.Linear(1, 1)\n"
        "model(torch.ones(1)).backward()\n"
        "torch.optim.SGD(model.parameters(), lr=0.1).step()\n"
        "print(before, 'torch._dynamo' in sys.modules)\n"
    )
    job = launched(launch, tmp_path, {}, "--preload", "torch._dynamo", source=source, fake_torch=None)
    assert job.wait(200.0) == 0, job.stderr()
    assert job.stdout().count("True True") == 2, job.stdout() + os.linesep + job.stderr()


def test_a_torch_that_is_too_old_is_named_and_the_job_runs(launch: Launch) -> None:
    """Our store and what we know of torch begin with 2.8."""
    job = launch("--nproc-per-node", "1", source="print('ran')", fake_torch='__version__ = "2.7.1+cpu"\n')
    assert job.wait() == 0
    assert "ran" in job.stdout()
    assert "needs torch 2.8 or newer, found 2.7.1+cpu: upgrade torch" in job.stderr()
