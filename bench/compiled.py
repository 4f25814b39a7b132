"""How long until the first compiled step after a death, the loss of a node and a second start: beside torchrun.

    python bench/compiled.py [--layers 2] [--cases start death node] [--json FILE]

A GPT-like model, compiled by inductor to C++, on CPUs. Each node is an agent on this host with a cache folder of its
own. A cold folder is empty; a warm one is a copy of what a first start has left. One rank per node where a node is
lost, two ranks where a rank dies. A death counts from the kill, the loss of a node and a start from the start of the
agent, each until the first step of the newest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from watched import end_once

SCRIPT = Path(__file__).resolve().parent / "ranks" / "compiles.py"
_LIMIT_S = 900.0


@dataclass
class Job:
    """The agents of one job, and what its ranks have told."""

    launcher: str  # torchrun or ddp-launch
    model: list[str]
    nodes: int
    nproc: int
    options: list[str] = field(default_factory=list)
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="bench-compiled-")))
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)
    limit_s: float = _LIMIT_S

    def __post_init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.endpoint = f"127.0.0.1:{free.getsockname()[1]}"

    def start(self, cache: Path) -> float:
        program = str(Path(sys.executable).parent / self.launcher)
        words = [program, "--nproc-per-node", str(self.nproc), "--max-restarts", "3"]
        words += ["--nnodes", str(self.nodes), "--rdzv-id", "compiled"]
        if self.launcher == "torchrun":
            words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", self.endpoint, "--local-addr", "127.0.0.1"]
        elif self.nodes > 1:
            words += ["--rendezvous", self.endpoint, "--insecure"]
        number = len(self.agents)
        env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "COMPILES": str(self.folder)}
        env |= {"NODE": str(number), "OMP_NUM_THREADS": "1"}
        with (self.folder / f"output-{number}").open("wb") as output:
            self.agents.append(
                subprocess.Popen(
                    [*words, *self.options, str(SCRIPT), *self.model],
                    env=env,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            )
        return time.time()

    def told(self, event: str) -> list[dict[str, Any]]:
        found = []
        for file in self.folder.glob("told-*"):
            whole = file.read_text().rpartition("\n")[0]
            found += [line for line in map(json.loads, whole.splitlines()) if line["event"] == event]
        return sorted(found, key=lambda line: line["at"])

    def until(self, event: str, count: int, after: float = 0.0) -> list[dict[str, Any]]:
        return self.until_true(
            lambda: [line for line in self.told(event) if line["at"] > after],
            lambda found: len(found) >= count,
        )

    def until_true(self, look: Any, enough: Any) -> Any:
        ends = time.monotonic() + self.limit_s
        while not enough(found := look()):
            ended = all(agent.poll() is not None for agent in self.agents)
            if ended or time.monotonic() > ends:
                raise RuntimeError(f"the job did not go on: {self.output()[-3000:]}")
            time.sleep(0.05)
        return found

    def output(self) -> str:
        files = sorted(self.folder.glob("output-*"))
        return "\n".join(file.read_text(errors="replace") for file in files)

    def saved(self, scratch: str) -> list[Path]:
        """Wait until the node has kept what its ranks have compiled."""
        found: list[Path] = self.until_true(lambda: [*Path(scratch).glob("compiled-*")], bool)
        return found

    def lose(self, number: int) -> None:
        """Everything of this agent ends at once."""
        agent = self.agents[number]
        pids = [line["pid"] for line in self.told("line") if line["node"] == str(number)]
        for pid in (agent.pid, *pids):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        agent.wait()

    def finish(self) -> list[int]:
        (self.folder / "stop").touch()
        return [agent.wait(self.limit_s) for agent in self.agents]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_error: object) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                agent.terminate()
                try:
                    agent.wait(30)
                except subprocess.TimeoutExpired:
                    agent.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def _folder(work: Path, seed: Path | None) -> Path:
    folder = Path(tempfile.mkdtemp(dir=work))
    if seed is not None:
        shutil.copytree(seed, folder, dirs_exist_ok=True)
    return folder


def _empty(folder: Path) -> None:
    for inner in folder.iterdir():
        shutil.rmtree(inner, ignore_errors=True)


def start(launcher: str, model: list[str], cache: Path, options: list[str]) -> float:
    with Job(launcher, model, 1, 2, options) as job:
        began = job.start(cache)
        took = job.until("stepped", 2)[-1]["at"] - began
        if options:
            job.saved(options[-1])
        job.finish()
        return float(took)


def death(launcher: str, model: list[str], cache: Path, options: list[str], cold: bool) -> float:
    with Job(launcher, model, 1, 2, options) as job:
        job.start(cache)
        last = job.until("stepped", 2)[-1]
        if options:
            job.saved(last["scratch"])
        if cold:
            _empty(cache)
        killed = time.time()
        os.kill(last["pid"], signal.SIGKILL)
        took = job.until("stepped", 2, killed)[1]["at"] - killed
        job.finish()
        return float(took)


def lost_node(launcher: str, model: list[str], caches: list[Path], options: list[str]) -> float:
    with Job(launcher, model, 2, 1, options) as job:
        for cache in caches[:2]:
            job.start(cache)
        for line in job.until("stepped", 2):
            if options:
                job.saved(line["scratch"])
        job.lose(1)
        began = job.start(caches[2])
        newest = job.until_true(lambda: [line for line in job.told("stepped") if line["node"] == "2"], bool)
        job.finish()
        return float(newest[0]["at"] - began)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", default="2")
    parser.add_argument("--cases", nargs="+", default=["start", "death", "node"])
    parser.add_argument("--json")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, end_once)
    model, found = ["gpt", asked.layers], {}
    work = Path(tempfile.mkdtemp(prefix="bench-compiled-"))

    def note(name: str, took: float) -> None:
        found[name] = round(took, 1)
        sys.stdout.write(f"{name:45} {took:7.1f} s   load {os.getloadavg()[0]:.1f}\n")
        sys.stdout.flush()

    try:
        seed, disk = _folder(work, None), _folder(work, None)
        note("start, torchrun, cold", start("torchrun", model, seed, []))
        memory, on_disk = ["--share-compiled", "memory"], ["--share-compiled", str(disk)]
        if "start" in asked.cases:
            note("start, torchrun, warm", start("torchrun", model, _folder(work, seed), []))
            start("ddp-launch", model, _folder(work, seed), on_disk)
            note("start, ours, cold, shared", start("ddp-launch", model, _folder(work, None), on_disk))
            note("start, ours, warm, not shared", start("ddp-launch", model, _folder(work, seed), []))
        ways = (("torchrun", []), ("ddp-launch", []), ("ddp-launch", memory))
        for launcher, options in ways:
            name = launcher + (", shared" if options else "")
            for cold in (False, True):
                state = "cold" if cold else "warm"
                if "death" in asked.cases:
                    took = death(launcher, model, _folder(work, seed), options, cold)
                    note(f"death of a rank, {name}, {state}", took)
                if "node" in asked.cases:
                    caches = [_folder(work, seed), _folder(work, seed), _folder(work, None if cold else seed)]
                    note(f"loss of a node, {name}, {state}", lost_node(launcher, model, caches, options))
        if asked.json:
            Path(asked.json).write_text(json.dumps(found, indent=1))
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
