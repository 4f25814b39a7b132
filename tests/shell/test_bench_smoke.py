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
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from etcd_cluster import needs_etcd

if TYPE_CHECKING:
    from pathlib import Path

NIGHTLY = pytest.mark.nightly(instead="::test_cluster")

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
ONCE = ("--rounds", "1", "--warm-up", "0", "--timeout", "100")


def run_bench(name: str, folder: Path, *options: str, key: str = "tables") -> tuple[list[Any], str]:
    """What it measured, table by table, and the page it wrote its table into."""
    page, figures, chart = folder / "page.md", folder / "figures.json", folder / "chart.png"
    page.write_text(f"above\n<!-- {name}:begin -->\nold\n<!-- {name}:end -->\nbelow\n")
    command = [sys.executable, os.path.join(ROOT, "bench", f"{name}.py"), *ONCE, *options]
    command += ["--json", str(figures), "--plot", str(chart), "--write-docs", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert chart.exists() == (importlib.util.find_spec("matplotlib") is not None)
    return json.loads(figures.read_text())[key], page.read_text()


def only_round(table: dict[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    (played,) = table["rounds"]
    assert not played["theirs"]["problem"]
    assert not played["ours"]["problem"]
    return played["theirs"]["figures"], played["ours"]["figures"]


@NIGHTLY
def test_launch(tmp_path: Path) -> None:
    (table, pooled), page = run_bench("launch", tmp_path, "--ranks", "1")
    _, of_pool = only_round(pooled)
    assert 0 < of_pool["torch"] < of_pool["reduced"] < of_pool["exit"]
    for figures in only_round(table):
        assert 0 < figures["torch"] < figures["reduced"] < figures["exit"]
        assert figures["cpu"] > 0.1
    assert "| command has exited |" in page
    assert page.startswith("above\n")
    assert page.endswith("below\n")
    assert "old" not in page


@NIGHTLY
def test_restart(tmp_path: Path) -> None:
    (table, trained), page = run_bench("restart", tmp_path, "--parts", "death", "--train-for", "0")
    assert all(0 < figures["stepped"] for figures in only_round(trained))
    for figures in only_round(table):
        assert 0 < figures["gone"] < figures["line"] < figures["reduced"]
    assert "0 without a figure" in page


@NIGHTLY
def test_recovery(tmp_path: Path) -> None:
    """Without the loss of a node, which torchrun never recovers from."""
    (table, _node), page = run_bench("recovery", tmp_path, "--node-rounds", "0", "--parts", "death")
    for figures in only_round(table):
        assert 0 < figures["gone"] < figures["reduced"]
    assert "| first all-reduce of the next generation |" in page


@NIGHTLY
@pytest.mark.parametrize(("bench", "title"), [("restart", "MLP, our DDP"), ("recovery", "MLP, torch's DDP")])
def test_first_step(bench: str, title: str, tmp_path: Path) -> None:
    page, figures = tmp_path / "page.md", tmp_path / "figures.json"
    page.write_text(f"<!-- {bench}-steps:begin -->\n<!-- {bench}-steps:end -->\n")
    job = "mlp ours" if "our" in title else "mlp torch"
    command = [sys.executable, os.path.join(ROOT, "bench", f"{bench}.py"), *ONCE, "--parts", "steps"]
    command += ["--jobs", job, "--train-for", "0", "--json", str(figures), "--write-docs", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    ((only,),) = json.loads(figures.read_text())["steps"].values()
    assert {"torchrun", "ddp-launch"} <= only.keys()
    assert all(0 < run["figures"]["stepped"] < 100 for run in only.values()), only
    assert f"| {title} |" in page.read_text()


@NIGHTLY
def test_agent(tmp_path: Path) -> None:
    (memory, _idle), _page = run_bench("agent", tmp_path, "--seconds", "0.2")
    for figures in only_round(memory):
        assert 0 < figures["agent_pss"] <= figures["agent_rss"]
        assert figures["agent_pss"] <= figures["launcher_pss"] < figures["job_pss"]
        assert figures["agent_cpu"] >= 0


def test_cluster(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- cluster:begin -->\n<!-- cluster:end -->\n")
    command = [sys.executable, os.path.join(ROOT, "bench", "cluster.py"), "--nodes", "3", "--ranks", "2"]
    done = subprocess.run(
        [*command, "--seconds", "0.2", "--write-docs", str(page)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    share = re.search(r"\| agent, CPU over 0\.2 s \| ([0-9.]+) % \|", page.read_text())
    assert share is not None
    assert float(share[1]) < 100


@NIGHTLY
def test_paper(tmp_path: Path) -> None:
    """A figure of real ranks on two hosts, a curve, and a predicted one."""
    page, figures = tmp_path / "page.md", tmp_path / "figures.json"
    chosen = ("loss", "hooks", "scale")
    page.write_text("".join(f"<!-- paper-{name}:begin -->\n<!-- paper-{name}:end -->\n" for name in chosen))
    command = [sys.executable, os.path.join(ROOT, "bench", "paper.py"), "--figures", *chosen, "--rounds", "1"]
    command += ["--json", str(figures), "--write-docs", str(page), "--pictures", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    if done.stdout.startswith("skipped: "):
        pytest.skip(done.stdout)
    found = json.loads(figures.read_text())
    curves = found["loss"][0][1]
    assert all(curve[-1][1] < curve[0][1] for curve in curves.values())
    assert all(taken > 0 for ((_, taken), _) in found["hooks"][0][1].values())
    assert all(len(points) == 9 for points in found["scale"][0][1].values())
    assert page.read_text().count("Machine:") == 3


@NIGHTLY
def test_plan(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- plan:begin -->\n<!-- plan:end -->\n")
    command = [sys.executable, os.path.join(ROOT, "bench", "plan.py"), "--hosts", "2", "--ranks-each", "1"]
    command += ["--models", "MLP, 1M", "--rates", "1gbit", "--write-docs", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    if done.stdout.startswith("skipped: "):
        pytest.skip(done.stdout)
    assert page.read_text().count("| 2 x 1 | 1gbit |") == 2


@NIGHTLY
def test_a_run_that_hangs_is_counted_and_leaves_nothing(tmp_path: Path) -> None:
    """Far too short a bound: both launchers are cut off in the middle, and the table says so."""
    command = [sys.executable, os.path.join(ROOT, "bench", "restart.py"), *ONCE, "--timeout", "0.3"]
    command += ["--parts", "death", "--train-for", "0"]
    command += ["--plot", str(tmp_path / "chart.png")]
    tag = str(tmp_path)
    env = {**os.environ, "BENCH_SMOKE": tag}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=env)
    assert done.returncode == 0, done.stderr
    assert "1 rounds, 2 without a figure (2 hung)" in done.stdout
    assert not tagged_processes(tag)


def tagged_processes(tag: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("BENCH_SMOKE") == tag:
                found.append(process.pid)
    return found


@NIGHTLY
def test_allreduce(tmp_path: Path) -> None:
    (table,), page = run_bench("allreduce", tmp_path, "--ranks", "2", "--sizes", "4", "65536")
    ranks, times = table
    assert ranks == 2
    for size in ("4", "65536"):
        assert {"gloo", "shm, copy", "shm, in place", "ring"} <= set(times[size])
        assert all(0 < seconds < 10 for (seconds,) in times[size].values())
    assert "| 64 KB |" in page
    assert "met" in page


@NIGHTLY
def test_checkpoints(tmp_path: Path) -> None:
    """Each state comes back as it was; the ranks check that."""
    table, page = run_bench("checkpoints", tmp_path, "--gb", "0.02", "--shardings", "FSDP2")
    ours, dcp = (table["0.02 GB, FSDP2"][name] for name in ("ddp.elastic", "DCP async_save"))
    for (figures,) in (ours, dcp):
        assert 0 < figures["stall"] < figures["durable"]
    assert "| 0.02 GB, FSDP2 | ddp.elastic |" in page


@NIGHTLY
def test_ddp(tmp_path: Path) -> None:
    asked = ("--ranks", "2", "--models", "MLP, 1M", "--parts", "steps")
    (found,), page = run_bench("ddp", tmp_path, *asked, key="found")
    part, model, ranks, taken, _peak = found
    assert (part, model, ranks) == ("steps", "MLP, 1M", 2)
    assert set(taken) == {"torch, Gloo", "ours, Gloo", "ours, shm", "alone"}
    assert all(0 < turn["step"] < 10 for (turn,) in taken.values())
    assert "| MLP, 1M |" in page


@NIGHTLY
def test_rendezvous(tmp_path: Path) -> None:
    asked = ("--sizes", "4", "--stores", "memory", "--seconds", "1")
    tables, page = run_bench("rendezvous", tmp_path, *asked)
    assert [(table["nodes"], table["problems"]) for table in tables] == [(4, []), (4, [])]
    assert "2 runs, 0 without a figure." in page


@NIGHTLY
@needs_etcd
def test_control_plane(tmp_path: Path) -> None:
    """Both leaders are killed once, and each failure is decided once."""
    page, figures = tmp_path / "page.md", tmp_path / "figures.json"
    page.write_text("<!-- control-plane:begin -->\n<!-- control-plane:end -->\n")
    command = [
        sys.executable,
        os.path.join(ROOT, "bench", "control_plane.py"),
        "--sizes",
        "8",
        "--kills",
        "1",
    ]
    command += ["--seconds", "0.5", "--json", str(figures), "--write-docs", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (played,) = json.loads(figures.read_text())["tables"]
    assert played["problems"] == [], done.stderr
    assert (played["lost"], played["doubled"]) == (0, 0)
    assert [kill["kind"] for kill in played["kills"]] == ["owner", "etcd"]
    assert 0 < played["kills"][0]["contact"] <= played["kills"][0]["ready"] < 100
    assert "2 kills: 0 decisions lost, 0 doubled, 0 other problems." in page.read_text()


@NIGHTLY
def test_logical(tmp_path: Path) -> None:
    page, figures = tmp_path / "page.md", tmp_path / "figures.json"
    page.write_text("<!-- logical:begin -->\n<!-- logical:end -->\n")
    command = [sys.executable, os.path.join(ROOT, "bench", "logical.py"), "--rounds", "1", "--worlds", "2"]
    command += ["--models", "MLP, 1M", "--json", str(figures), "--write-docs", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())["found"]
    assert [world for _model, world, _taken in found] == [[2, 1, "shm"], [2, 2, "shm"]]
    assert all(set(taken) == {"plain", "logical"} for _model, _world, taken in found)
    assert page.read_text().count("| MLP, 1M | 2 |") == 2


@NIGHTLY
def test_marked(tmp_path: Path) -> None:
    page, figures = tmp_path / "page.md", tmp_path / "figures.json"
    page.write_text("<!-- marked:begin -->\n<!-- marked:end -->\n")
    command = [sys.executable, os.path.join(ROOT, "bench", "marked.py"), "--rounds", "1"]
    command += ["--models", "MLP, 1M", "--json", str(figures), "--write-docs", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())["found"]
    assert [every for _model, every, _taken in found] == [0, 1]
    assert all(set(taken) == {"plain", "kept"} for _model, _every, taken in found)
    assert page.read_text().count("| MLP, 1M |") == 2


@NIGHTLY
def test_silent(tmp_path: Path) -> None:
    page, figures = tmp_path / "page.md", tmp_path / "figures.json"
    page.write_text("<!-- silent:begin -->\n<!-- silent:end -->\n")
    command = [sys.executable, os.path.join(ROOT, "bench", "silent.py"), "--rounds", "1"]
    command += ["--json", str(figures), "--write-docs", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    taken = json.loads(figures.read_text())["taken"]
    assert all(0 < seconds < 60 for of_how in taken.values() for seconds in of_how)
    assert [len(of_how) for of_how in taken.values()] == [1, 1], done.stderr
    assert "| `--recover in-place` |" in page.read_text()


@NIGHTLY
def test_hierarchical(tmp_path: Path) -> None:
    page, figures = tmp_path / "page.md", tmp_path / "figures.json"
    page.write_text("<!-- hierarchical:begin -->\n<!-- hierarchical:end -->\n")
    command = [sys.executable, os.path.join(ROOT, "bench", "hierarchical.py"), "--rounds", "1"]
    command += ["--rates", "1gbit", "--models", "MLP, 1M", "--sizes", "65536"]
    done = subprocess.run(
        [*command, "--json", str(figures), "--write-docs", str(page)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    if done.stdout.startswith("skipped: "):
        pytest.skip(done.stdout.strip())
    tables = json.loads(figures.read_text())["tables"]
    assert [(one["ranks_each"], one["what"]) for one in tables] == [
        (2, "MLP, 1M"),
        (2, "65536"),
        (1, "65536"),
    ]
    assert set(tables[0]["taken"]) == {"torch, Gloo", "ours, Gloo", "ours, hier"}
    assert all(0 < seconds < 60 for one in tables for (seconds,) in one["taken"].values())
    assert "| 1gbit | MLP, 1M |" in page.read_text()


@NIGHTLY
def test_overhead(tmp_path: Path) -> None:
    page, figures = tmp_path / "page.md", tmp_path / "figures.json"
    page.write_text("<!-- overhead-mlp:begin -->\n<!-- overhead-mlp:end -->\n")
    command = [sys.executable, os.path.join(ROOT, "bench", "overhead.py"), "--launches", "1", "--rounds", "2"]
    command += [
        "--models",
        "MLP, 1M",
        "--kinds",
        "torch DDP",
        "--ranks",
        "2",
        "--json",
        str(figures),
        "--write-docs",
        str(page),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(figures.read_text())["found"]
    assert set(found["taken"]) == {"everything off", "everything on", "torchrun"}
    assert all(len(taken) == 2 and 0 < min(taken) < 5 for taken in found["taken"].values())
    assert "| MLP, 1M, torch DDP, 2 ranks |" in page.read_text()


@NIGHTLY
def test_status_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- status-page:begin -->\n<!-- status-page:end -->\n")
    command = [sys.executable, os.path.join(ROOT, "bench", "status_page.py"), "--rounds", "1"]
    command += ["--blocks", "2", "--calls", "100", "--write-docs", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "| a collective entered |" in page.read_text()
    assert "(median of 2 pairs of blocks" in page.read_text()


def test_a_page_shows_the_rows_that_its_marker_names(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("The machine is: a PC.\n<!-- x:begin rows: 4 B|1 GB -->\nold\n<!-- x:end -->\nbelow\n")
    rows = "| {} | t |\n|---|---|\n| 4 B | {} |\n| 64 B | 2 |\n\n3 rounds, 0 without a figure."
    other = "| other | t |\n|---|---|\n| 2 B | 3 |\n\n9 rounds, none."
    text = f"{rows.format('size', 1)}\n\n{other}\n\nMachine: a PC; load 1."
    command = "import shown, sys; shown.write_between_markers(sys.argv[1], 'x', sys.argv[2])"
    bench = os.path.join(ROOT, "bench")
    subprocess.run([sys.executable, "-c", command, str(page), text], check=True, cwd=bench)
    shown = "| size | t |\n|---|---|\n| 4 B | 1 |\n\n3 rounds, 0 without a figure.\n\nLoad 1."
    assert page.read_text() == (
        f"The machine is: a PC.\n<!-- x:begin rows: 4 B|1 GB -->\n{shown}\n<!-- x:end -->\nbelow\n"
    )
