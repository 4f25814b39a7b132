"""Callers of torchrun start our agent in an environment that asked for it, and torch's in all others."""

from __future__ import annotations

import os
import signal
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from ddp_launch_wings.callers import entry

_S = 120.0
NIGHTLY = pytest.mark.nightly(instead="::test_a_call_in_process_starts_our_agent")
# What our agent prints before each line, and torchrun does not.
RANK_OF_OURS = 'echo "rank $RANK of $WORLD_SIZE restarts $TORCHELASTIC_MAX_RESTARTS"'


class Environment:
    """A virtual environment of its own, with the packages of this one."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True)
        self.folder, self.bin = folder, folder / "bin"
        packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        here = sysconfig.get_path("purelib")
        (packages / "packages.pth").write_text(f"import site; site.addsitedir({here!r})\n")
        self.torchrun = self.bin / "torchrun"
        self.torchrun.write_text("#!/bin/sh\necho torch\n")
        self.torchrun.chmod(0o755)
        self.pth = packages / "zz_ddp_launch_as_torchrun.pth"

    def start(self, *words: str | Path) -> subprocess.Popen[str]:
        env = {
            name: text for name, text in os.environ.items() if not name.startswith(("PET_", "DDP_LAUNCH_"))
        }
        env |= {"PATH": f"{self.bin}:{env['PATH']}", "PYTHONPATH": str(self.folder)}
        return subprocess.Popen(
            [str(word) for word in words],
            env=env,
            cwd=self.folder,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        with self.start(*words) as process:
            out, err = process.communicate(timeout=_S)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def shim(self, word: str) -> str:
        done = self.run(self.bin / "python", "-m", "launcher", "as-torchrun", word)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "env")


def lines_of(text: str) -> list[str]:
    return sorted(line.partition("] ")[2] for line in text.splitlines() if line.startswith("["))


def test_an_environment_gets_our_torchrun_and_gets_torchs_back(environment: Environment) -> None:
    assert "starts ddp-launch" not in environment.shim("status")
    for _ in range(2):  # a second time keeps what torch had
        environment.shim("install")
    assert environment.shim("status").count("ddp-launch") == 2
    # The line of torchtitan's run_train.sh, whatever it trains.
    words = "--nproc_per_node=2 --rdzv_backend c10d --rdzv_endpoint=localhost:0 --local-ranks-filter 0,1 --role rank"
    done = environment.run("bash", "-c", f"torchrun {words} --tee 3 --no-python sh -c '{RANK_OF_OURS}'")
    assert (done.returncode, lines_of(done.stdout)) == (
        0,
        ["rank 0 of 2 restarts 0", "rank 1 of 2 restarts 0"],
    ), done.stderr
    alone = environment.run("torchrun", "--no-python", "sh", "-c", RANK_OF_OURS)
    assert lines_of(alone.stdout) == ["rank 0 of 1 restarts 0"]
    environment.shim("remove")
    assert environment.run("torchrun").stdout == "torch\n"
    assert not environment.pth.exists()
    assert sorted(path.name for path in environment.bin.glob("torchrun*")) == ["torchrun"]


def test_a_newer_torchrun_is_not_replaced_by_the_one_that_was_kept(environment: Environment) -> None:
    environment.shim("install")
    environment.torchrun.write_text("#!/bin/sh\necho newer\n")
    environment.shim("remove")
    assert environment.run("torchrun").stdout == "newer\n"
    assert sorted(path.name for path in environment.bin.glob("torchrun*")) == ["torchrun"]


_CALLER = """
import sys
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
try:
    run.main(sys.argv[1:])
except ChildFailedError as error:
    print("failed with", error.get_first_failure()[1].exitcode)
else:
    print("went on")
"""


def test_a_call_in_process_starts_our_agent(environment: Environment) -> None:
    environment.shim("install")
    (environment.folder / "caller.py").write_text(_CALLER)
    python = environment.bin / "python"
    common = ("caller.py", "--nproc_per_node=2", "--max-restarts=1", "-r", "0", "--no-python")
    # The script fails in its first start, and is started again.
    script = f"{RANK_OF_OURS}; test $TORCHELASTIC_RESTART_COUNT = 1 || exit 7"
    done = environment.run(python, *common, "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    # In the first start, one rank may be stopped before it prints.
    assert set(lines_of(done.stdout)) == {"rank 0 of 2 restarts 1", "rank 1 of 2 restarts 1"}
    assert done.stdout.endswith("went on\n")
    failed = environment.run(python, "caller.py", "--nproc_per_node=1", "--no-python", "sh", "-c", "exit 7")
    assert failed.stdout.endswith("failed with 7\n"), failed.stderr


@NIGHTLY
def test_python_m_and_signals_reach_our_agent(environment: Environment) -> None:
    environment.shim("install")
    words = ("--nproc_per_node=1", "--no-python", "sh", "-c", "echo ready; sleep 600 & wait")
    as_module = environment.start(environment.bin / "python", "-m", "torch.distributed.run", *words)
    (environment.folder / "caller.py").write_text(_CALLER)
    in_process = environment.start(environment.bin / "python", "caller.py", *words)
    for process, code in ((as_module, 143), (in_process, 0)):
        assert process.stdout is not None
        line = ""
        while "ready" not in line:
            line = process.stdout.readline()
            assert line, process.communicate(timeout=_S)
        assert line.startswith("[")
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=_S)
        assert process.returncode == code
    assert "failed with 143" in out


@pytest.mark.parametrize(
    ("given", "environ", "expected"),
    [
        ((), {}, ["--nproc-per-node=1", "--insecure"]),
        (("nproc_per_node",), {"DDP_LAUNCH_SECRET_FILE": "/a"}, []),
        (("secret_file",), {"PET_NPROC_PER_NODE": "4"}, []),
    ],
)
def test_defaults_are_those_of_torchrun(
    given: tuple[str, ...], environ: dict[str, str], expected: list[str]
) -> None:
    assert entry.defaults(dict.fromkeys(given), environ) == expected


_TRAINING = """
import sys, torch
assert not any("callers" in repr(each) for each in sys.meta_path), sys.meta_path
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(4, 1))
loss = model(torch.ones(2, 4)).sum()
accelerator.backward(loss)
print("rank", accelerator.process_index, "of", accelerator.num_processes, type(model).__name__)
accelerator.end_training()
"""


@NIGHTLY
def test_accelerate_launch_starts_our_agent(environment: Environment) -> None:
    environment.shim("install")
    (environment.folder / "train.py").write_text(_TRAINING)
    launch = ("--multi_gpu", "--num_processes", "2", "--main_process_port", "0", "train.py")
    command = "import sys; from accelerate.commands.accelerate_cli import main; sys.exit(main())"
    done = environment.run(environment.bin / "python", "-c", command, "launch", *launch)
    assert done.returncode == 0, done.stderr
    assert lines_of(done.stdout) == [f"rank {rank} of 2 DistributedDataParallel" for rank in range(2)]
