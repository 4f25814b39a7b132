"""ddpctl reload on real jobs: the edited script goes on, or the earlier one does, and everybody is told."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING

import pytest
from launched import eventually

from launcher.ranks.zygote_watch import ZygoteWatch
from launcher.settings.spec import EntryKind, EntryPoint
from rendezvous.control.ctl import main

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from launched import Launch, Launched

    Ctl = Callable[..., tuple[int, str, str]]

# Without torch: each step is saved in a file, and a start goes on from there.
SCRIPT = """
import os, sys, time
import helper
from ddp.telemetry import status_page
rank, there = os.environ["RANK"], os.environ["THERE"]
page = status_page.page()
saved = os.path.join(there, f"step-{rank}")
step = int(open(saved).read()) if os.path.exists(saved) else 0
page.number(step)
request = os.environ["DDP_CHECKPOINT_REQUEST"]
open(f"{request}.watched.{rank}", "w").close()
print(f"{helper.WORD} from step {step} beside {os.listdir(os.path.dirname(os.path.abspath(__file__)))}", flush=True)
while not os.path.exists(os.path.join(there, "end")):
    page.phase(status_page.FORWARD)
    time.sleep(0.01)
    step += 1
    page.step()
    page.number(step)
    helper.check(step)
    is_answered = os.path.exists(f"{request}.done.{rank}")  # first: the agent removes the request before the answers
    if os.path.exists(request) and not is_answered:
        with open(saved, "w") as file:
            file.write(str(step))
        open(f"{request}.done.{rank}", "w").close()
print(f"{helper.WORD} ends", flush=True)
"""
HELPER = "WORD = 'one'\ndef check(step): pass\n"
TWO = HELPER.replace("one", "two")
RAISES_LATER = """
WORD, first = "three", []
def check(step):
    first or first.append(step)
    if step > first[0] + 3:
        raise ValueError("a bad edit")
"""


@pytest.fixture
def ctl(capsys: pytest.CaptureFixture[str]) -> Ctl:
    def call(*words: str) -> tuple[int, str, str]:
        code = main(words)
        return (code, *capsys.readouterr())

    return call


def started(launch: Launch, tmp_path: Path, runtime: str, *options: str) -> Launched:
    words = ("--nproc-per-node", "2", "--max-restarts", "0", "--preflight", "off", *options)
    (tmp_path / "job0").mkdir()  # of the first job
    (tmp_path / "job0" / "helper.py").write_text(HELPER)
    job = launch(*words, source=SCRIPT, fake_torch="", env={"XDG_RUNTIME_DIR": runtime})
    eventually(lambda: job.stdout().count("one from step 0") == 2, what="both ranks run")
    return job


def edit(job: Launched, text: str) -> None:
    """Another length each time: an interpreter compares only that and the second of the change."""
    (job.folder / "helper.py").write_text(f"# {os.urandom(8).hex() * len(text)}\n{text}")


def end(job: Launched) -> str:
    (job.there / "end").touch()
    assert job.wait() == 0, job.said()
    job.assert_nothing_left()
    return job.stdout()


@pytest.mark.parametrize("options", [(), ("--no-warm-start",)], ids=["warm", "plain"])
def test_an_edited_script_goes_on_and_a_broken_one_is_taken_back(
    launch: Launch, tmp_path: Path, runtime: str, ctl: Ctl, options: tuple[str, ...]
) -> None:
    job = started(launch, tmp_path, runtime, *options)
    edit(job, TWO)
    code, out, err = ctl("reload", "--reason", "a better helper")
    assert code == 0, err
    assert "changed: helper.py; all ranks have taken a checkpoint" in out
    assert "the edited script runs in generation 2" in out
    steps = {int((job.there / f"step-{rank}").read_text()) for rank in (0, 1)}
    eventually(lambda: all(f"two from step {step} " in job.stdout() for step in steps), what=f"from {steps}")
    assert min(steps) > 0

    edit(job, "def broken(:")
    code, _, err = ctl("reload")
    assert code == 1
    assert "helper.py, line 2: SyntaxError" in err
    assert "nothing was stopped" in err

    edit(job, RAISES_LATER)
    code, out, _ = ctl("reload")
    assert code == 1
    why = "ValueError: a bad edit; the edited script failed within the first 10 steps after the reload"
    assert why in out
    assert f"{why}, so its earlier files are taken again; restarting with the same nodes" in job.said()
    eventually(lambda: job.stdout().count("two from step") == 4, what="the earlier files run")
    _, out, _ = ctl("why")
    assert "decided     rollback: rank" in out
    _, out, _ = ctl("status", job_id(ctl))
    assert "reloads: 2, of which 1 rolled back" in out
    assert "a better helper" in out
    said = end(job)
    assert said.count("two ends") == 2
    earlier = [line for line in said.splitlines() if "two from step" in line]
    assert all("'train.py'" in line for line in earlier), "what lies beside the script is there for them, too"
    assert "the ranks run the script as it was in generation 2, from copies: " in job.said()


def job_id(ctl: Ctl) -> str:
    _, out, _ = ctl("list")
    return out.splitlines()[1].split()[0]


class _Zygote:
    """A zygote without a process."""

    has_learned = False

    warm, is_pooled, pid = True, False, 1

    def __init__(self, did: list[str]) -> None:
        self._did = did
        self._ours, self._theirs = socket.socketpair()
        self.when_blocked = lambda: None

    def fileno(self) -> int:
        return self._ours.fileno()

    def flush(self) -> bool:
        return True

    def retire(self) -> None:
        self._did.append("retire")

    def await_end(self, _timeout_s: float) -> int:
        self._did.append("await its end")
        return 0

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()


class _Starter:
    def __init__(self, did: list[str], is_unfit: bool) -> None:
        self._did, self._is_unfit = did, is_unfit

    def use(self, _entry: EntryPoint) -> bool:
        return self._is_unfit

    def hold_scratch(self) -> None:
        self._did.append("hold the scratch folder")

    def clean_up(self) -> None:
        pass

    def start(self) -> _Zygote:
        self._did.append("start another")
        return _Zygote(self._did)


@pytest.mark.parametrize(("has_learned", "is_unfit"), [(False, False), (True, False), (False, True)])
def test_a_zygote_that_has_learned_imports_does_not_serve_an_edited_script(
    has_learned: bool, is_unfit: bool
) -> None:
    """It may set other variables before it imports the same modules."""
    did: list[str] = []

    async def story() -> None:
        watch = ZygoteWatch(_Starter(did, is_unfit), _Zygote(did), did.append)  # type: ignore[arg-type]
        watch.has_learned = has_learned
        assert await watch.use(EntryPoint(EntryKind.SCRIPT, "train.py")) is (has_learned or is_unfit)
        assert not watch.has_learned
        watch.close()

    asyncio.run(story())
    renewed = ["hold the scratch folder", "retire", "await its end", "start another"]
    assert did == (renewed if has_learned or is_unfit else [])


@pytest.mark.parametrize("kind", ["module", "program"])
def test_only_scripts_can_be_reloaded(
    launch: Launch, runtime: str, ctl: Ctl, kind: str, tmp_path: Path
) -> None:
    source = "import os, time\nopen(os.path.join(os.environ['THERE'], 'on'), 'w').close()\ntime.sleep(60)"
    (tmp_path / "program.py").write_text(source)
    words = (
        ("-m", "program") if kind == "module" else ("--no-python", "python3", str(tmp_path / "program.py"))
    )
    env = {"XDG_RUNTIME_DIR": runtime, "PYTHONPATH": str(tmp_path)}
    job = launch("--preflight", "off", *words, fake_torch="", env=env)
    job.await_there("on")
    code, _, err = ctl("reload")
    assert code == 1
    assert "only a Python script can be reloaded" in err
    ctl("abort", job_id(ctl))
    job.wait()


def test_a_module_that_was_imported_beforehand_is_no_part_of_a_reload(
    launch: Launch, tmp_path: Path, runtime: str, ctl: Ctl
) -> None:
    job = started(launch, tmp_path, runtime, "--preload", "helper", "--no-warm-start")
    code, _, err = ctl("reload")
    assert code == 1
    assert "helper is in the folder of the script and is imported before the ranks start (--preload)" in err
    end(job)
