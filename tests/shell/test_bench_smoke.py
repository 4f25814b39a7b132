"""Each benchmark runs, measures both launchers, and puts its table where the page has a place for it.

One of them runs with every `make test`; most of the others start torch several times.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from etcd_cluster import needs_etcd

NIGHTLY = pytest.mark.nightly(instead="::test_cluster")

BENCH = Path(__file__).parents[2] / "bench"
ONCE = ("--rounds", "1")
BOTH = (*ONCE, "--warm-up", "0", "--timeout", "100")  # of those that run both launchers side by side


def run(name: str, folder: Path, *words: str, marks: tuple[str, ...] = (), has_json: bool = True) -> Any:
    """What it measured, and the page it wrote its tables into; `marks`: their places, if not one of its name."""
    page, figures = folder / "page.md", folder / "figures.json"
    places = [f"<!-- {mark}:begin -->\nold\n<!-- {mark}:end -->\n" for mark in marks or (name,)]
    page.write_text(f"above\n{''.join(places)}below\n")
    command = [sys.executable, str(BENCH / f"{name}.py"), *words, "--write-docs", str(page)]
    command += ["--json", str(figures)] if has_json else []
    command += ["--plot", str(folder / "chart.png")] if "--warm-up" in words else []  # else into docs/img
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    if done.stdout.startswith("skipped: "):
        pytest.skip(done.stdout.strip())
    text = page.read_text()
    assert text.startswith("above\n")
    assert text.endswith("below\n")
    assert "old" not in text
    return json.loads(figures.read_text()) if has_json else None, text


def only_round(table: dict[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    (played,) = table["rounds"]
    assert not played["theirs"]["problem"]
    assert not played["ours"]["problem"]
    return played["theirs"]["figures"], played["ours"]["figures"]


# --- beside torchrun ---------------------------------------------------------------------------------------


@NIGHTLY
def test_launch(tmp_path: Path) -> None:
    found, page = run("launch", tmp_path, *BOTH, "--ranks", "1")
    table, pooled = found["tables"]
    for figures in (*only_round(table), only_round(pooled)[1]):
        assert 0 < figures["torch"] < figures["reduced"] < figures["exit"]
    assert all(figures["cpu"] > 0.1 for figures in only_round(table))
    assert (tmp_path / "chart.png").exists() == (importlib.util.find_spec("matplotlib") is not None)
    assert "| command has exited |" in page


@NIGHTLY
def test_restart(tmp_path: Path) -> None:
    found, page = run("restart", tmp_path, *BOTH, "--parts", "death", "--train-for", "0")
    table, trained = found["tables"]
    assert all(0 < figures["stepped"] for figures in only_round(trained))
    assert all(0 < figures["gone"] < figures["line"] < figures["reduced"] for figures in only_round(table))
    assert "0 without a figure" in page


@NIGHTLY
def test_recovery(tmp_path: Path) -> None:
    """Without the loss of a node, which torchrun never recovers from."""
    found, page = run("recovery", tmp_path, *BOTH, "--node-rounds", "0", "--parts", "death")
    table, _node = found["tables"]
    assert all(0 < figures["gone"] < figures["reduced"] for figures in only_round(table))
    assert "| first all-reduce of the next generation |" in page


@NIGHTLY
@pytest.mark.parametrize(
    ("bench", "job", "title"),
    [("restart", "mlp ours", "MLP, our DDP"), ("recovery", "mlp torch", "MLP, torch's DDP")],
)
def test_first_step(bench: str, job: str, title: str, tmp_path: Path) -> None:
    words = (*BOTH, "--parts", "steps", "--jobs", job, "--train-for", "0")
    found, page = run(bench, tmp_path, *words, marks=(f"{bench}-steps",))
    ((only,),) = found["steps"].values()
    assert {"torchrun", "ddp-launch"} <= only.keys()
    assert all(0 < each["figures"]["stepped"] < 100 for each in only.values()), only
    assert f"| {title} |" in page


@NIGHTLY
def test_agent(tmp_path: Path) -> None:
    found, _page = run("agent", tmp_path, *BOTH, "--seconds", "0.2")
    for figures in only_round(found["tables"][0]):
        assert 0 < figures["agent_pss"] <= figures["agent_rss"]
        assert figures["agent_pss"] <= figures["launcher_pss"] < figures["job_pss"]
        assert figures["agent_cpu"] >= 0


@NIGHTLY
def test_a_run_that_hangs_is_counted_and_leaves_nothing(tmp_path: Path) -> None:
    """Far too short a bound: both launchers are cut off in the middle, and the table says so."""
    words = (*ONCE, "--warm-up", "0", "--timeout", "0.3", "--parts", "death", "--train-for", "0")
    command = [sys.executable, str(BENCH / "restart.py"), *words, "--plot", str(tmp_path / "chart.png")]
    env = {**os.environ, "BENCH_SMOKE": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=env)
    assert done.returncode == 0, done.stderr
    for launcher in ("torchrun", "ddp-launch"):
        assert f"{launcher} 1 runs, 1 without a figure (1 of them hung)" in done.stdout
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            assert process.environ().get("BENCH_SMOKE") != str(tmp_path)


# --- the library -------------------------------------------------------------------------------------------


@NIGHTLY
def test_allreduce(tmp_path: Path) -> None:
    found, page = run("allreduce", tmp_path, *BOTH, "--ranks", "2", "--sizes", "4", "65536")
    ((ranks, times),) = found["tables"]
    assert ranks == 2
    for size in ("4", "65536"):
        assert {"gloo", "shm, copy", "shm, in place", "ring"} <= set(times[size])
        assert all(0 < seconds < 60 for (seconds,) in times[size].values())
    assert "| 64 KB |" in page


@NIGHTLY
def test_checkpoints(tmp_path: Path) -> None:
    """Each state comes back as it was; the ranks check that."""
    found, page = run("checkpoints", tmp_path, *BOTH, "--gb", "0.02", "--shardings", "FSDP2")
    for name in ("ddp.elastic", "DCP async_save"):
        (figures,) = found["tables"]["0.02 GB, FSDP2"][name]
        assert 0 < figures["stall"] < figures["durable"]
    assert "| 0.02 GB, FSDP2 | ddp.elastic |" in page


@NIGHTLY
def test_ddp(tmp_path: Path) -> None:
    asked = ("--ranks", "2", "--models", "MLP, 1M", "--parts", "steps")
    found, page = run("ddp", tmp_path, *BOTH, *asked)
    ((part, model, ranks, taken, _peak),) = found["found"]
    assert (part, model, ranks) == ("steps", "MLP, 1M", 2)
    assert set(taken) == {"torch, Gloo", "ours, Gloo", "ours, shm", "alone"}
    assert all(0 < turn["step"] < 10 for (turn,) in taken.values())
    assert "| MLP, 1M |" in page


@NIGHTLY
def test_logical(tmp_path: Path) -> None:
    found, page = run("logical", tmp_path, *ONCE, "--worlds", "2", "--models", "MLP, 1M")
    assert [world for _model, world, _taken in found["found"]] == [[2, 1, "shm"], [2, 2, "shm"]]
    assert all(set(taken) == {"plain", "logical"} for _model, _world, taken in found["found"])
    assert page.count("| MLP, 1M | 2 |") == 2


@NIGHTLY
def test_marked(tmp_path: Path) -> None:
    found, page = run("marked", tmp_path, *ONCE, "--models", "MLP, 1M")
    assert [every for _model, every, _taken in found["found"]] == [0, 1]
    assert all(set(taken) == {"plain", "kept"} for _model, _every, taken in found["found"])
    assert page.count("| MLP, 1M |") == 2


@NIGHTLY
def test_silent(tmp_path: Path) -> None:
    found, page = run("silent", tmp_path, *ONCE)
    assert [len(of_how) for of_how in found["taken"].values()] == [1, 1]
    assert all(0 < seconds < 60 for of_how in found["taken"].values() for seconds in of_how)
    assert "| `--recover in-place` |" in page


@NIGHTLY
def test_hierarchical(tmp_path: Path) -> None:
    words = ("--rates", "1gbit", "--models", "MLP, 1M", "--sizes", "65536")
    found, page = run("hierarchical", tmp_path, *ONCE, *words)
    tables = found["tables"]
    asked = [(2, "MLP, 1M"), (2, "65536"), (1, "65536")]
    assert [(one["ranks_each"], one["what"]) for one in tables] == asked
    assert set(tables[0]["taken"]) == {"torch, Gloo", "ours, Gloo", "ours, hier"}
    assert all(0 < seconds < 60 for one in tables for (seconds,) in one["taken"].values())
    assert "| 1gbit | MLP, 1M |" in page


@NIGHTLY
def test_overhead(tmp_path: Path) -> None:
    words = (
        "--launches",
        "1",
        "--rounds",
        "2",
        "--models",
        "MLP, 1M",
        "--kinds",
        "torch DDP",
        "--ranks",
        "2",
    )
    found, page = run("overhead", tmp_path, *words, marks=("overhead-mlp",))
    (only,) = found["found"]
    assert set(only["taken"]) == {"everything off", "everything on", "torchrun"}
    assert all(len(taken) == 2 and 0 < min(taken) < 5 for taken in only["taken"].values())
    assert "| MLP, 1M, torch DDP, 2 ranks |" in page


@NIGHTLY
def test_status_page(tmp_path: Path) -> None:
    _, page = run("status_page", tmp_path, *ONCE, "--blocks", "2", "--calls", "100", has_json=False)
    assert "| a collective entered |" in page
    assert "(median of 2 pairs of blocks" in page


# --- the service, and clusters -----------------------------------------------------------------------------


def test_cluster(tmp_path: Path) -> None:
    words = ("--nodes", "3", "--ranks", "2", "--seconds", "0.2")
    _, page = run("cluster", tmp_path, *words, has_json=False)
    share = re.search(r"\| agent, CPU over 0\.2 s \| ([0-9.]+) % \|", page)
    assert share is not None
    assert float(share[1]) < 100


@NIGHTLY
def test_rendezvous(tmp_path: Path) -> None:
    asked = ("--sizes", "4", "--stores", "memory", "--seconds", "1")
    found, page = run("rendezvous", tmp_path, *BOTH, *asked)
    assert [(table["nodes"], table["problems"]) for table in found["tables"]] == [(4, []), (4, [])]
    assert "2 runs, 0 without a figure." in page


@NIGHTLY
@needs_etcd
def test_control_plane(tmp_path: Path) -> None:
    """Both leaders are killed once, and each failure is decided once."""
    words = ("--sizes", "8", "--kills", "1", "--seconds", "0.5")
    found, page = run("control_plane", tmp_path, *words, marks=("control-plane",))
    (played,) = found["tables"]
    assert (played["problems"], played["lost"], played["doubled"]) == ([], 0, 0)
    assert [kill["kind"] for kill in played["kills"]] == ["owner", "etcd"]
    assert 0 < played["kills"][0]["contact"] <= played["kills"][0]["ready"] < 100
    assert "2 kills: 0 decisions lost, 0 doubled, 0 other problems." in page


@NIGHTLY
def test_paper(tmp_path: Path) -> None:
    """A figure of real ranks on two hosts, a curve, and a predicted one."""
    chosen = ("loss", "hooks", "scale")
    words = ("--figures", *chosen, *ONCE, "--pictures", str(tmp_path))
    found, page = run("paper", tmp_path, *words, marks=tuple(f"paper-{name}" for name in chosen))
    assert all(curve[-1][1] < curve[0][1] for curve in found["loss"][0][1].values())
    assert all(taken > 0 for ((_, taken), _) in found["hooks"][0][1].values())
    assert all(len(points) == 9 for points in found["scale"][0][1].values())
    assert page.count("Machine:") == 3


@NIGHTLY
def test_plan(tmp_path: Path) -> None:
    words = ("--hosts", "2", "--ranks-each", "1", "--models", "MLP, 1M", "--rates", "1gbit")
    _, page = run("plan", tmp_path, *words, has_json=False)
    assert page.count("| 2 x 1 | 1gbit |") == 2
