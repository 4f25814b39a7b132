"""`make gpu` without a GPU: it is planned, rehearsed, continued, and shown, as it is where there is one."""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import gpu_command
import gpu_docs
import gpu_page
import gpu_parts
import gpu_results
import pytest
from gpu_parts import PARTS, Part
from gpu_results import Outcome, PartResult, Results

import ddp

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COMMAND = ROOT / "bench" / "gpu"
SAMPLE = HERE / "sample.json"  # of a rehearsal
MACHINE = {"devices": ["a GPU, 80 GiB"], "torch": "2.11", "nccl": "2.28.9", "python": "3.12"}


def command(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    done = [sys.executable, str(COMMAND / "gpu_command.py"), *words, "--results", str(folder)]
    return subprocess.run(done, capture_output=True, text=True, check=False)


# --- the plan ----------------------------------------------------------------------------------------


def test_the_parts_fit_into_their_time() -> None:
    assert sum(part.usual_s for part in PARTS) <= gpu_parts.TOTAL_S
    assert all(part.usual_s < part.limit_s <= 240 for part in PARTS)
    assert len({part.name for part in PARTS}) == len(PARTS)
    assert all((COMMAND / part.program).exists() for part in PARTS)
    kinds = [0 if part in PARTS[:5] else 1 if part.name.startswith("fault-") else 2 for part in PARTS]
    assert kinds == sorted(kinds), "tests, faults, benchmarks, in this order"


def test_without_a_gpu_it_says_what_it_would_do(tmp_path: Path) -> None:
    done = command(folder=tmp_path / "results")
    if "sees no GPU" not in done.stdout:
        pytest.skip("there is a GPU here")
    assert done.returncode == 0, done.stderr
    assert all(f"{part.name} " in done.stdout for part in PARTS)
    assert not (tmp_path / "results").exists()


def test_the_tests_that_need_a_gpu_use_names_that_exist() -> None:
    """They run where there is a GPU only, and our names change meanwhile."""
    for path in sorted(HERE.glob("test_*gpu*.py")):
        tree = ast.parse(path.read_text())
        ours = {
            alias.asname or alias.name: importlib.import_module(f"{node.module}.{alias.name}")
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module in ("ddp.telemetry", "ddp.groups")
            for alias in node.names
        } | {"ddp": ddp}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ours:
                assert hasattr(ours[node.value.id], node.attr), f"{path.name}: {ast.unparse(node)}"


# --- a run, with parts of our own --------------------------------------------------------------------

REPORTS = """
    import gpu_part
    gpu_part.found("figure", table="t", name="n", unit="s", values=[1.0], limit=None)
    gpu_part.found("figure", table="t", name="n", unit="s", values=[1.0, 2.0], limit=None)
"""


def part_of(folder: Path, source: str, limit_s: float = 60.0) -> Part:
    program = folder / f"part{len(list(folder.glob('part*')))}.py"
    program.write_text(f"import sys; sys.path.insert(0, {str(COMMAND)!r})\n" + textwrap.dedent(source))
    return Part(program.stem, "", str(program), usual_s=0.1, limit_s=limit_s)


def played(folder: Path, part: Part) -> PartResult:
    options = argparse.Namespace(rehearse="cpu", results=folder, budget=100.0, again=False)
    run = gpu_command.Run(options, dict(os.environ), Results(MACHINE, True))
    return run._played(part, part.limit_s)


def test_a_part_that_breaks_keeps_its_figures_and_says_why(tmp_path: Path) -> None:
    result = played(tmp_path, part_of(tmp_path, REPORTS + "    raise ValueError('no such kernel')\n"))
    assert result.outcome is Outcome.FAILED
    assert "no such kernel" in result.why
    assert len(result.findings) == 1
    assert "no such kernel" in (tmp_path / "gpu.log").read_text()


def test_a_part_is_stopped_with_all_its_processes(tmp_path: Path) -> None:
    """Also those in sessions of their own, as ranks are."""
    source = f"""
    import os, subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
    time.sleep(600)
    """
    began = time.monotonic()
    result = played(tmp_path, part_of(tmp_path, REPORTS + source, limit_s=3.0))
    assert result.outcome is Outcome.LATE
    assert len(result.findings) == 1
    assert time.monotonic() - began < 40
    child = Path(f"/proc/{(tmp_path / 'child').read_text()}")
    assert not child.exists() or " Z " in (child / "stat").read_text()


# --- going on ----------------------------------------------------------------------------------------


def test_the_next_run_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    results = Results(MACHINE)
    results.parts = {
        "a": PartResult(Outcome.FAILED, why="it broke"),
        "b": PartResult(Outcome.DONE),
        "c": PartResult(Outcome.FAILED, attempts=gpu_results.ATTEMPTS),
        "d": PartResult(Outcome.NOT_RUN),
    }
    path = tmp_path / "gpu.json"
    gpu_results.write(path, results)
    again = gpu_results.read(path)
    assert again == results
    assert gpu_results.left_in_order(["a", "b", "c", "d", "e"], again) == ["e", "a"]


# --- what is shown -----------------------------------------------------------------------------------


def sample() -> Results:
    results = gpu_results.read(SAMPLE)
    assert results is not None
    return results


def test_the_sample_becomes_tables_with_all_its_rows() -> None:
    results = sample()
    text = gpu_page.performance(results)
    for row in results.findings("comparison") + results.findings("figure"):
        assert f"| {row['name']} |" in text
    assert {row["table"] for row in results.findings("comparison")} == set(gpu_page.TABLES)
    assert "a rehearsal on CPUs, whose figures mean nothing" in text
    shown = gpu_page.faults(results)
    for row in results.findings("fault"):
        assert f"| `{row['name']}` |" in shown
    assert f"{len(results.findings('fault'))} cases: " in shown


def test_the_pages_have_a_place_for_it_and_a_rehearsal_does_not_get_there() -> None:
    for page, name, text in gpu_docs.PLACES:
        whole = gpu_docs.replaced(page.read_text(), name, text(sample()))
        assert whole.count("a rehearsal on CPUs") == 1
        assert "a rehearsal on CPUs" not in page.read_text()
        assert gpu_docs.replaced(whole, name, "other text").count("a rehearsal on CPUs") == 0
    done = subprocess.run(
        [sys.executable, str(COMMAND / "gpu_docs.py"), str(SAMPLE)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "is of a rehearsal" in done.stderr


# --- rehearsed ---------------------------------------------------------------------------------------


def rehearsed(folder: Path, *names: str) -> Results:
    done = command("--rehearse", "cpu", *names, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr + (folder / "gpu.log").read_text()[-6000:]
    results = gpu_results.read(folder / "gpu.json")
    assert results is not None
    return results


def test_a_measurement_on_cpus(tmp_path: Path) -> None:
    """The cheapest of those that compare; `make nightly` rehearses all parts."""
    results = rehearsed(tmp_path, "reducer-many-1")
    assert results.parts["reducer-many-1"].outcome is Outcome.DONE
    assert {each["table"] for each in results.parts["reducer-many-1"].findings} == {"reducer", "cpu"}


@pytest.mark.nightly(instead="::test_a_measurement_on_cpus")
@pytest.mark.timeout(1800)
def test_every_part_on_cpus(tmp_path: Path) -> None:
    results = rehearsed(tmp_path)
    outcomes = {name: part.outcome for name, part in results.parts.items()}
    cannot = {"sharing"} | {name for name in outcomes if name == "fault-link-cut"}  # the latter without root
    assert {name for name, each in outcomes.items() if each is not Outcome.DONE} <= cannot
    assert set(outcomes) == {part.name for part in PARTS}
    played_right = {each["name"]: each["correct"] for each in results.findings("fault")}
    assert set(played_right.values()) == {"yes"}, played_right
    assert {each["table"] for each in results.findings("comparison")} == set(gpu_page.TABLES)
