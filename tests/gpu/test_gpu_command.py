"""`make gpu` without a GPU: it is planned, rehearsed, continued, and shown, as it is where there is one."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import gpu_command
import gpu_docs
import gpu_machine
import gpu_page
import gpu_parts
import gpu_results
import pytest
from gpu_parts import PARTS, Part
from gpu_results import Outcome, PartResult, Results, WrongResults

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


def test_parts_are_chosen_by_name_or_beginning() -> None:
    assert gpu_parts.chosen([]) == [part.name for part in PARTS]
    assert gpu_parts.chosen(["restart", "machine"]) == ["machine", "restart"]
    assert len(gpu_parts.chosen(["fault-"])) == sum(part.name.startswith("fault-") for part in PARTS)
    with pytest.raises(gpu_parts.NoSuchPart, match="there is no part 'coffee'"):
        gpu_parts.chosen(["coffee"])


def test_parts_that_need_to_know_how_ranks_share_a_card_ask_first() -> None:
    assert gpu_parts.with_what_they_need(["restart"], ()) == ["sharing", "restart"]
    assert gpu_parts.with_what_they_need(["restart"], ("machine", "sharing")) == ["restart"]
    assert gpu_parts.with_what_they_need(["machine"], ()) == ["machine"]
    everything = gpu_parts.chosen([])
    assert gpu_parts.with_what_they_need(everything, ()) == everything


def test_a_part_begins_only_if_its_usual_time_is_left() -> None:
    part = Part("p", "", "", usual_s=20, limit_s=60)
    assert gpu_parts.allowance_s(part, 19) is None
    assert gpu_parts.allowance_s(part, 30) == 30
    assert gpu_parts.allowance_s(part, 500) == 60


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


def test_make_uses_the_interpreter_that_is_named() -> None:
    def planned(*words: str) -> str:
        outer = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")  # of the `make test` that runs this
        env = {name: value for name, value in os.environ.items() if name not in outer}
        command = ["make", "--no-print-directory", "-n", "gpu", *words]
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True).stdout

    assert planned("PYTHON=python3", "PARTS=launch").startswith("python3 bench/gpu/gpu_command.py launch ")
    assert planned().startswith((".venv/bin/python ", "python3 "))


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


def test_what_a_part_reports_last_of_a_row_is_kept(tmp_path: Path) -> None:
    result = played(tmp_path, part_of(tmp_path, REPORTS))
    assert result.outcome is Outcome.DONE
    assert [each["values"] for each in result.findings] == [[1.0, 2.0]]


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


def test_a_part_that_cannot_run_here_is_not_a_failure(tmp_path: Path) -> None:
    result = played(
        tmp_path, part_of(tmp_path, "    import gpu_part\n    gpu_part.not_run('one GPU only')\n")
    )
    assert (result.outcome, result.why) == (Outcome.NOT_RUN, "one GPU only")


def test_a_check_that_fails_is_a_failure(tmp_path: Path) -> None:
    source = "    import gpu_part\n    gpu_part.found('check', name='sums', ok=False, detail='3 is not 4')\n"
    result = played(tmp_path, part_of(tmp_path, source))
    assert (result.outcome, result.why) == (Outcome.FAILED, "failed: sums")


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


def test_a_second_attempt_that_finds_less_replaces_nothing() -> None:
    first = PartResult(Outcome.LATE, findings=[{"kind": "check"}, {"kind": "check"}])
    worse = PartResult(Outcome.FAILED, findings=[{"kind": "check"}]).after(first)
    assert (len(worse.findings), worse.outcome, worse.attempts) == (2, Outcome.LATE, 2)
    better = PartResult(Outcome.DONE, findings=[{"kind": "check"}]).after(first)
    assert (len(better.findings), better.outcome, better.attempts) == (1, Outcome.DONE, 2)


def test_results_of_another_machine_or_format_are_not_continued(tmp_path: Path) -> None:
    options = argparse.Namespace(results=tmp_path, rehearse=None)
    path = tmp_path / "gpu.json"
    gpu_results.write(path, Results(MACHINE | {"torch": "2.10"}))
    with pytest.raises(WrongResults, match="another machine or release"):
        gpu_command.earlier(options, MACHINE)
    path.write_text(json.dumps({"format": 99}))
    with pytest.raises(WrongResults, match="format is 99"):
        gpu_command.earlier(options, MACHINE)
    path.write_text("nonsense")
    with pytest.raises(WrongResults, match="not a file of results"):
        gpu_command.earlier(options, MACHINE)


def test_a_library_that_is_not_nccl_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "libnccl.so.2"
    empty.touch()
    for place, says in ((tmp_path, "is not an NCCL library"), (tmp_path / "nowhere", "there is no libnccl")):
        done = command("--libnccl", str(place), "machine", "--rehearse", "cpu", folder=tmp_path / "results")
        assert done.returncode == 2
        assert says in done.stderr


def test_an_nccl_that_torch_does_not_use_is_refused() -> None:
    library = Path("libnccl.so.2")
    gpu_machine.check_preloaded({"nccl": "2.30.7"}, library, "2.30.7")
    with pytest.raises(gpu_machine.CannotAsk, match=r"torch uses 2\.28\.9 NCCL, although .* is preloaded"):
        gpu_machine.check_preloaded({"nccl": "2.28.9"}, library, "2.30.7")


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


def test_ratios_and_targets_of_a_row() -> None:
    row = {"kind": "comparison", "table": "launch", "name": "n", "unit": "s", "target": 0.5}
    met = gpu_page._comparison(row | {"theirs": [2.0, 4.0, 2.0], "ours": [0.8, 1.2, 1.0]})
    assert met == "| n | 2.000 s | 1.000 s | 0.400 (0.300 .. 0.500) | <= 0.5 | met |"
    assert gpu_page._comparison(row | {"theirs": [1.0], "ours": [1.0]}).endswith("| <= 0.5 | not met |")
    assert gpu_page._comparison(row | {"theirs": [], "ours": []}).endswith("| - | <= 0.5 | no figure |")
    figure = {"name": "n", "unit": "us", "values": [4.0, 2.0, 2.5], "limit": 3.0}
    assert gpu_page._figure(figure) == "| n |  | 2.500 us |  | <= 3 us | met |"


def test_parts_without_figures_are_named_with_the_reason() -> None:
    results = Results(MACHINE | {"processor": "a CPU", "cpus": 8})
    results.parts["launch"] = PartResult(Outcome.NOT_RUN, why="no GPU")
    results.parts["fault-killed"] = PartResult(Outcome.FAILED, why="line 1\nline | 2")
    assert "- `launch`: not run: no GPU\n- `first-step`: not reached" in gpu_page.performance(results)
    assert "- `fault-killed`: failed: line 1 line / 2" in gpu_page.faults(results)
    assert "Not measured yet." in gpu_page.faults(results)


def test_a_wrong_verdict_is_counted() -> None:
    results = sample()
    results.findings("fault")[0]["correct"] = "no: wrong rank"
    assert ", 1 wrong. Target: 0 wrong." in gpu_page.faults(results)


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
