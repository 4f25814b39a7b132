"""`make gpu` without a GPU: it is planned, rehearsed, continued, and shown, as it is where there is one."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import gpu_docs
import gpu_page
import gpu_parts
import gpu_results
import pytest
from gpu_parts import PARTS
from gpu_results import Outcome, Results

import ddp

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COMMAND = ROOT / "bench" / "gpu"
SAMPLE = HERE / "sample.json"  # of a rehearsal


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


# --- going on ----------------------------------------------------------------------------------------


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
