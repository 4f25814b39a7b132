"""Programs of libraries give under ddp-launch what they give under torchrun, also with our class in torch's place.

They need `make .venv-unchanged/.installed`, which `make nightly` does. Compared are all of standard output, exit codes,
the rank that failed first, what is left, and the names of the files that were written.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from comparing import differences
from outcomes import ROOT, DdpLaunch, Outcome, Torchrun
from random_programs import Program

NIGHTLY = pytest.mark.nightly(instead="unchanged/test_random_programs.py::test_as_under_torchrun")

if TYPE_CHECKING:
    from collections.abc import Iterator

_HERE = Path(__file__).parent / "programs"
_PACKAGES = ROOT / ".venv-unchanged/lib/python{}.{}/site-packages".format(*sys.version_info)
_ACCELERATE = ("test_script", "test_sync", "test_ops", "test_ddp_comm_hook")
_OUR_CLASS = """
import torch.nn.parallel, torch.nn.parallel.distributed, ddp
torch.nn.parallel.DistributedDataParallel = ddp.DistributedDataParallel
torch.nn.parallel.distributed.DistributedDataParallel = ddp.DistributedDataParallel
"""

_TIMED = re.compile(r"it/s|runtime")  # lines that tell how fast it was
_PROGRAMS: dict[str, tuple[str, ...]] = {
    **{f"accelerate {name}": ("accelerate_own.py", name) for name in _ACCELERATE},
    "transformers": ("transformers_trainer.py",),
    "lightning": ("lightning_trainer.py",),
    "lightning stopped": ("lightning_sigterm.py",),
    "fabric": ("fabric_loop.py",),
    "gpt": ("gpt_loop.py",),
    "images": ("image_loop.py",),
    "fsdp": ("fsdp_loop.py",),
    "click": ("click_command.py", "--epochs", "3", "tiny"),
    "click fails": ("click_command.py", "wrong"),
    "tensorboard": ("tensorboard_writer.py",),
    "wandb": ("wandb_offline.py",),
    "server": ("inference_server.py",),
}
_WITH_OUR_CLASS = ("accelerate test_sync", "transformers", "fabric", "gpt", "images")


def _program(name: str, before: str = "") -> Program:
    if not _PACKAGES.is_dir():
        pytest.skip("its packages are not installed: make .venv-unchanged/.installed")
    script, *arguments = _PROGRAMS[name]
    env = {"PYTHONPATH": str(_PACKAGES), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    source = before + (_HERE / script).read_text()
    return Program(0, source, 2, ("-r", "3"), ("train.py",), tuple(arguments), None, env, needs_torch=True)


def _comparable(outcome: Outcome) -> Outcome:
    """Without standard error, which has times in it; of files the names, but for times and hosts in them."""
    outcome.logs = {
        name: "".join(line for line in text.splitlines(keepends=True) if not _TIMED.search(line))
        for name, text in outcome.logs.items()
        if not name.endswith("stderr.log")
    }
    outcome.files = {name: "" for name in outcome.files if not name.startswith(("runs", "wandb"))}
    outcome.err = []
    return outcome


Launchers = tuple[Torchrun, DdpLaunch]


@pytest.fixture(scope="module")
def launchers() -> Iterator[Launchers]:
    servers = Torchrun(), DdpLaunch()
    yield servers
    for server in servers:
        server.close()


def _compare(theirs: Program, ours: Program, launchers: Launchers, folder: Path) -> None:
    torchrun, ddp_launch = launchers
    expected = torchrun.run(theirs, folder / "torchrun")
    errors = [path.read_text()[-2000:] for path in (folder / "torchrun" / "logs").rglob("stderr.log")]
    found = _comparable(ddp_launch.run(ours, folder / "ours"))
    assert differences(ours, _comparable(expected), found) == [], (expected, errors)


@NIGHTLY
@pytest.mark.parametrize("name", _PROGRAMS)
def test_under_both_launchers(name: str, launchers: Launchers, folder: Path) -> None:
    _compare(_program(name), _program(name), launchers, folder)


@NIGHTLY
@pytest.mark.parametrize("name", _WITH_OUR_CLASS)
def test_with_our_class(name: str, launchers: Launchers, folder: Path) -> None:
    _compare(_program(name), _program(name, _OUR_CLASS), launchers, folder)
