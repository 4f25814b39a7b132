"""Installs each archive of dist/ into an empty environment outside of the tree, and runs jobs from it: `make dist`.

    a job of two ranks, which trains with ddp.DistributedDataParallel
    a job of two nodes, with a secret, each started by a command of its own
    torchrun with our rendezvous plug-in, against `ddp-rendezvous serve`
    `ddp-launch --version` and `ddp-launch docs`, in a folder that cannot be read from the checkout

grpcio and protobuf come from the index, as they would for a user. torch is large: the environment sees the torch of
this one, by a .pth file. The archive of the sources is installed without a compiler, which has to work too.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

DIST = Path(__file__).parents[2] / "dist"
_WITHIN_S = 300

TRAIN = """
import sys, torch, ddp
from ddp.groups import core_loading
place = ddp.init()
torch.manual_seed(0)
model = ddp.DistributedDataParallel(torch.nn.Linear(8, 1).to(place.device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    optimizer.zero_grad()
    model(torch.randn(4, 8, generator=torch.Generator().manual_seed(place.rank))).square().mean().backward()
    optimizer.step()
assert "site-packages" in ddp.__file__, ddp.__file__
print("trained", place.rank, place.world_size, place.backend, core_loading.native() is not None)
ddp.shutdown()
"""
STOCK = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
os.write(1, b"counted %d\\n" % int(total))  # in one piece: ranks share the output
dist.destroy_process_group()  # a thread of Gloo that still runs at the end can abort the process
"""


class Failed(Exception):
    """What an installation did not do."""


class Environment:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._words([sys.executable, "-m", "venv", str(folder / "env")])
        self.bin = folder / "env" / "bin"

    def install(self, archive: Path) -> None:
        without = {"CC": "/nowhere/cc"} if archive.suffix == ".gz" else {}
        pip = [str(self.bin / "python"), "-m", "pip", "--disable-pip-version-check", "-q", "install"]
        self._words([*pip, str(archive)], **without)

    def borrow_torch(self) -> None:
        """The other environment's own .pth files, and so its installation of our packages, are not read."""
        (site,) = (self.folder / "env").glob("lib/python*/site-packages")
        theirs = subprocess.run(
            [sys.executable, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
        (site / "torch-of-another.pth").write_text(f"{theirs}\n")

    def run(self, command: str, *words: str) -> str:
        return self._words([str(self.bin / command), *words])

    def start(self, command: str, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.bin / command), *words],
            cwd=self.folder,
            env=self._environ(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self, process: subprocess.Popen[str]) -> str:
        said, _ = process.communicate(timeout=_WITHIN_S)
        if process.returncode:
            raise Failed(f"{process.args} ended with {process.returncode}:\n{said}")
        return said

    def _words(self, command: list[str], **more: str) -> str:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self._environ() | more,
            capture_output=True,
            text=True,
            timeout=_WITHIN_S,
            check=False,
        )
        if done.returncode:
            raise Failed(f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def _environ(self) -> dict[str, str]:
        """Without what would lead to this checkout."""
        ours = ("PYTHON", "VIRTUAL_ENV", "DDP_", "PET_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        return kept | {"PATH": f"{self.folder / 'env' / 'bin'}:{os.environ.get('PATH', os.defpath)}"}


def one_node(env: Environment, core: bool) -> None:
    said = env.run("ddp-launch", "--nproc-per-node", "2", "train.py")
    for rank in (0, 1):
        _look(f"trained {rank} 2 {'shm True' if core else 'gloo False'}", said)
    if not core:
        _look("the compiled core is not installed", said)


def two_nodes(env: Environment, core: bool) -> None:
    env.run("ddp-rendezvous", "secret", "job.pem")
    where = ("--nnodes", "2", "--rendezvous", f"127.0.0.1:{_free_port()}", "--secret-file", "job.pem")
    nodes = [env.start("ddp-launch", *where, "--nproc-per-node", "1", "train.py") for _ in range(2)]
    said = "".join([env.finish(node) for node in nodes])
    for rank in (0, 1):
        _look(f"trained {rank} 2 ", said)


def plug_in(env: Environment, core: bool) -> None:
    where = f"127.0.0.1:{_free_port()}"
    service = env.start("ddp-rendezvous", "serve", "--listen", where, "--store", "memory")
    try:
        _wait_for(where)
        words = ("--rdzv-backend", "ddp", "--rdzv-endpoint", where, "--nnodes", "1", "--nproc-per-node", "2")
        said = env.run("python", "-m", "torch.distributed.run", *words, "stock.py")
    finally:
        service.terminate()
        service.communicate(timeout=_WITHIN_S)
    if said.count("counted 2") != 2:
        raise Failed(f"torchrun with the plug-in:\n{said}")


def about_itself(env: Environment, core: bool) -> None:
    said = env.run("ddp-launch", "--version")
    _look("core compiled," if core else "core not compiled", said)
    _look("torch 2.", said)
    _look("# ", env.run("ddp-launch", "docs", "hangs"))


TRIALS = (about_itself, one_node, two_nodes, plug_in)


def _look(words: str, said: str) -> None:
    if words not in said:
        raise Failed(f"{words!r} is not in:\n{said}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(where: str) -> None:
    host, _, port = where.partition(":")
    deadline = time.monotonic() + _WITHIN_S
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except OSError:
            if time.monotonic() > deadline:
                raise Failed(f"no service at {where}") from None
            time.sleep(0.05)
        else:
            return


def archives() -> Iterator[Path]:
    for path in sorted(DIST.iterdir()):
        if path.name.endswith((f"{os.uname().machine}.whl", "-none-any.whl", ".tar.gz")):
            yield path


def main() -> None:
    for archive in archives():
        folder = Path(tempfile.mkdtemp(prefix="ddp-try-"))
        try:
            env = Environment(folder)
            began = time.monotonic()
            env.install(archive)
            took = time.monotonic() - began
            env.borrow_torch()
            (folder / "train.py").write_text(TRAIN)
            (folder / "stock.py").write_text(STOCK)
            for trial in TRIALS:
                trial(env, "abi3" in archive.name)
            print(f"{archive.name}: installed in {took:.1f} s without torch; a job, two nodes, torchrun")
        except Failed as failure:
            sys.exit(f"{archive.name}: {failure}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
