"""`--share-compiled`: what torch.compile has made reaches ranks that start later, and never stops a job."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import threading
import time
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
import torch
from launched import eventually
from torch.distributed import TCPStore

from ddp_launch_wings.compiled import between_nodes, bundle
from ddp_launch_wings.compiled.sharer import Sharer

if TYPE_CHECKING:
    from pathlib import Path

    from launched import Launch, Launched

_S = 600.0  # a compilation on a machine that others use as well
KEY = "k" * 32

# Its model has only matrix products, so nothing has to be compiled to C++.
TRAINS = """
import json, os, signal, sys, time
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

def tell(name, **told):
    path = os.path.join(os.environ["THERE"], f"{name}-{os.environ['DDP_GENERATION']}-{os.environ['RANK']}")
    with open(path + ".part", "w") as file:
        json.dump({"pid": os.getpid(), "scratch": os.environ["DDP_SCRATCH"], **told}, file)
    os.rename(path + ".part", path)

torch.manual_seed(1)
net = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(2)))
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.compile(net))
stop = torch.zeros(1)
first = True
while not stop:
    model(torch.ones(2, 8)).sum().backward()
    if first:
        tell("stepped", **{k: counters["inductor"][f"fxgraph_cache_{k}"] for k in ("hit", "miss")})
        first = False
    stop.fill_(os.path.exists(os.path.join(os.environ["THERE"], "stop")))
    dist.all_reduce(stop)
    time.sleep(0.02)
"""


def told(job: Launched, name: str) -> Any:
    """What the one rank of this node has told; which of the job it is is chance."""

    def came() -> list[Path]:
        assert job.agent.poll() is None, job.stderr()
        return [*job.there.glob(f"{name}-[01]")]

    (path,) = eventually(came, _S, name)
    return json.loads(path.read_text())


def kept(folder: str | Path) -> Path:
    """Wait for the file of this key."""
    return eventually(lambda: [each for each in _files(folder) if not each.name.endswith(".tmp")], _S)[0]


def _files(folder: str | Path) -> list[Path]:
    from pathlib import Path

    return sorted(Path(folder).glob("compiled-*"))


def test_a_node_that_replaces_a_lost_one_compiles_nothing(launch: Launch, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--max-restarts",
        "2",
        "--insecure",
        "--share-compiled",
    ]
    words += ["memory", "--rendezvous", f"127.0.0.1:{port}", "--rdzv-id", "compiled"]

    def node(name: str) -> Launched:
        env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / name), "OMP_NUM_THREADS": "1"}
        return launch(*words, str(script), env=env)

    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    first = node("a")
    second = node("b")
    survivor, lost = told(first, "stepped-1"), told(second, "stepped-1")
    assert survivor["miss"]
    assert lost["miss"]
    kept(survivor["scratch"])
    second.send(signal.SIGKILL)
    os.kill(lost["pid"], signal.SIGKILL)
    newcomer = node("c")
    replacement = told(newcomer, "stepped-2")
    (first.there / "stop").touch()
    assert (first.wait(_S), newcomer.wait(_S)) == (0, 0)
    assert (replacement["hit"], replacement["miss"]) == (survivor["miss"], 0)
    assert "compiled parts from another node" in newcomer.stderr() + newcomer.stdout()


@pytest.mark.nightly(instead="::test_a_node_that_replaces_a_lost_one_compiles_nothing")
def test_a_second_start_finds_it_on_disk_and_a_damaged_file_is_left_alone(
    launch: Launch, tmp_path: Path
) -> None:
    folder = tmp_path / "kept"

    def run(cache: str) -> tuple[Any, str]:
        env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / cache), "OMP_NUM_THREADS": "1"}
        job = launch("--nproc-per-node", "1", "--share-compiled", str(folder), source=TRAINS, env=env)
        stepped = told(job, "stepped-1")
        kept(folder)
        (job.there / "stop").touch()
        assert job.wait(_S) == 0
        return stepped, job.stderr() + job.stdout()

    compiled, _ = run("a")
    loaded, said = run("b")
    assert (loaded["hit"], loaded["miss"]) == (compiled["miss"], 0)
    assert f"compiled parts from {folder}" in said
    file = kept(folder)
    data = bytearray(file.read_bytes())
    data[-10] ^= 1
    file.write_bytes(data)
    again, said = run("c")
    assert again["miss"] == compiled["miss"]
    assert f"compiled code from {folder} was not used: its contents do not match its digest" in said


HEALS = """
import json, os, signal, time
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
import ddp
from ddp import elastic

ddp.init("gloo")
torch.manual_seed(1)
net = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(2)))
model = ddp.DistributedDataParallel(torch.compile(net))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
state = elastic.State(model=model, optimizer=optimizer, step=0)
seen = []

def train():
    while state.step < 6:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        state.step += 1
        state.commit()
        seen.append([os.environ["DDP_GENERATION"], counters["stats"]["unique_graphs"], os.getpid()])
        if state.step == 3 and os.environ["RANK"] == "1" and os.environ["DDP_GENERATION"] == "1":
            while not any(name.startswith("compiled-") for name in os.listdir(os.environ["DDP_SCRATCH"])):
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)

state.run(train)
with open(os.path.join(os.environ["THERE"], "seen-" + os.environ["RANK"]), "w") as file:
    json.dump({"seen": seen, "miss": counters["inductor"]["fxgraph_cache_miss"]}, file)
state.close()
ddp.shutdown()
"""


@pytest.mark.nightly(instead="::test_a_node_that_replaces_a_lost_one_compiles_nothing")
def test_a_heal_keeps_the_compiled_code_of_survivors_and_its_replacement_compiles_nothing(
    launch: Launch, tmp_path: Path
) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    words = ["--nproc-per-node", "2", "--max-restarts", "1", "--recover", "in-place"]
    job = launch(*words, "--share-compiled", "memory", source=HEALS, env=env)
    assert job.wait(_S) == 0, job.stderr()
    survivor = json.loads((job.there / "seen-0").read_text())["seen"]
    assert {generation for generation, _, _ in survivor} == {"1", "2"}
    assert len({(graphs, pid) for _, graphs, pid in survivor}) == 1, survivor
    assert json.loads((job.there / "seen-1").read_text())["miss"] == 0


@pytest.mark.parametrize("asked", [True, False])
def test_a_job_that_compiles_nothing_keeps_and_imports_nothing(launch: Launch, asked: bool) -> None:
    source = """
import json, os, sys, threading
import torch
torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
found = [name for name in sys.modules if name == "torch._inductor.compile_fx" or "wings" in name]
print(json.dumps([found, sorted(os.listdir(os.environ["DDP_SCRATCH"])),
                  [each.name for each in threading.enumerate() if "compiled" in each.name]]))
"""
    words = ["--share-compiled", "memory"] if asked else []
    job = launch("--nproc-per-node", "1", *words, source=source)
    assert job.wait() == 0, job.stderr()
    modules, files, threads = json.loads(job.stdout().partition("] ")[2])
    assert "torch._inductor.compile_fx" not in modules
    assert asked == bool(modules)
    assert not threads
    assert not [file for file in files if file.startswith("compiled")]


# --- without processes -----------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setattr(bundle, "cache_folder", lambda: str(folder))
    return folder


def packed(**files: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("artifacts", b"")
        for name, data in files.items():
            archive.writestr(name, data)
    return made.getvalue()


def test_only_the_same_key_with_the_same_digest_is_opened() -> None:
    data = bundle.sealed(KEY, b"contents")
    assert bundle.opened(KEY, data) == b"contents"
    for other in (
        data[:-1],
        data + b"x",
        data.replace(b"contents", b"contests"),
        b"",
        b"\xff\n",
        b"[]\n",
        b"{}\n",
    ):
        with pytest.raises(bundle.BundleRefused):
            bundle.opened(KEY, other)
    with pytest.raises(bundle.BundleRefused, match="do not match"):
        bundle.opened("other", data)


def test_files_go_only_into_torchs_cache_folder_and_replace_nothing(cache: Path) -> None:
    (cache / "old.so").write_bytes(b"old")
    assert bundle.give_to_torch(packed(**{"files/old.so": b"new", "files/ab/new.so": b"new"})) == 2
    assert ((cache / "old.so").read_bytes(), (cache / "ab" / "new.so").read_bytes()) == (b"old", b"new")
    with pytest.raises(bundle.BundleRefused, match=r"it names files/../../x"):
        bundle.give_to_torch(packed(**{"files/../../x": b"x"}))


def test_a_torch_without_artifacts_gives_the_files_that_it_has_written(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.compiler, "save_cache_artifacts")
    now = time.time()
    for name, age in (("older.py", 60), ("a.py", 0), ("a.lock", 0)):
        (cache / name).write_text(name)
        os.utime(cache / name, (now - age, now - age))
    found = bundle.collect(now - 1)
    assert found is not None
    (cache / "a.py").unlink()
    assert bundle.give_to_torch(found) == 1
    assert (cache / "a.py").read_text() == "a.py"
    monkeypatch.setattr(bundle, "MOST_BYTES", 3)
    with pytest.raises(bundle.BundleRefused, match="the limit"):
        bundle.collect(now - 1)


def test_what_is_too_large_or_is_no_file_of_ours_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"x" * 5000)
    sharer = Sharer([str(tmp_path)], 0.0)
    assert sharer._read(str(tmp_path / "missing")) is None
    assert sharer._read(str(file)) == b"x" * 5000
    monkeypatch.setattr(bundle, "MOST_BYTES", 100)
    assert sharer._read(str(file)) is None
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    os.chown(file, 1, -1) if os.geteuid() == 0 else None
    assert sharer._read(str(file)) is None
    assert "belongs to another user" in capsys.readouterr().err


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    made = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(made.port),
        "DDP_GENERATION": "2",
        "GROUP_WORLD_SIZE": "2",
        "RANK": "0",
    }.items():
        monkeypatch.setenv(name, value)
    return made


def test_a_peer_answers_in_pieces(store: TCPStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(between_nodes, "_PIECE", 7)
    monkeypatch.setattr(between_nodes, "ANSWER_S", 600.0)
    path, over = tmp_path / "kept", threading.Event()
    path.write_bytes(b"compiled code")
    server = between_nodes.PeerAnswers()

    def serve() -> None:
        while not over.is_set():
            server.turn(KEY, str(path))
            over.wait(0.01)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert between_nodes.ask(between_nodes.connected(), KEY, 2) == b"compiled code"
    finally:
        over.set()
        thread.join()


def test_if_every_rank_asks_none_waits(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(between_nodes, "ANSWER_S", 600.0)
    store.add(f"ddp-compiled/{KEY}/asking", 1)
    assert between_nodes.ask(between_nodes.connected(), KEY, 2) is None


def test_no_peer_is_awaited_for_long(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(between_nodes, "ANSWER_S", 0.1)
    assert between_nodes.ask(between_nodes.connected(), KEY, 2) is None


def test_an_error_is_one_line_and_the_script_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> str:
        raise OSError("no such device")

    monkeypatch.setattr(bundle, "key", fails)
    Sharer([str(tmp_path)], 0.0).begin()
    assert capsys.readouterr().err.count("\n") == 1
