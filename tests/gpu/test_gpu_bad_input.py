"""`make gpu` and `make gpu-docs` with wrong values, damaged files, and an interruption: what they say."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gpu_command
import gpu_docs
import gpu_floor
import gpu_results
import pytest
from gpu_parts import Part
from gpu_results import Results, WrongResults

if TYPE_CHECKING:
    import subprocess

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COMMAND = ROOT / "bench" / "gpu"
MACHINE = {"devices": ["a GPU, 80 GiB"], "torch": "2.11", "nccl": "2.28.9", "python": "3.12"}
FIGURE = {"kind": "figure", "table": "commit", "name": "n", "unit": "s", "values": [1.0], "limit": None}


@pytest.mark.parametrize("budget", ["nan", "-3", "0", "inf", "soon", ""])
def test_a_budget_without_an_end_or_a_beginning_is_refused(budget: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"'{budget}' is not a number of seconds above 0"):
        gpu_command.seconds(budget)


def test_a_python_that_is_too_old_is_named() -> None:
    """Its words must be readable for that Python too: no module of ours is imported before them."""
    assert gpu_floor.too_old((3, 11, 0)) == ""
    assert "is Python 3.9, and ddp-launch needs 3.11 or newer. Name another one" in gpu_floor.too_old(
        (3, 9, 2)
    )
    for name in ("gpu_command.py", "gpu_docs.py"):
        imports = [
            line
            for line in (COMMAND / name).read_text().splitlines()
            if line.startswith(("import gpu_", "from gpu_"))
        ]
        assert imports[0].startswith("import gpu_floor ")


# --- damaged results -----------------------------------------------------------------------------------


def part(**more: Any) -> dict[str, Any]:
    return {"outcome": "done", "took_s": 1.0, "why": "", "findings": [FIGURE], "attempts": 1} | more


def whole(**more: Any) -> dict[str, Any]:
    return {"format": 1, "machine": MACHINE, "rehearsal": False, "parts": {"commit": part()}} | more


def finding(**more: Any) -> dict[str, Any]:
    return whole(parts={"commit": part(findings=[FIGURE | more])})


def without(value: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: each for name, each in value.items() if name != key}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"format": 1, "machine"', "it is not a file of results"),
        (b"\xff\xfe\x00", "it is not a text file"),
        (whole(format=None), "its format is None"),
        (without(whole(), "parts"), "the file has no 'parts'"),
        (whole(machine=without(MACHINE, "torch")), "'machine' has no 'torch'"),
        (whole(machine=MACHINE | {"devices": [None]}), "'devices' of 'machine' has an entry of another type"),
        (whole(parts={"commit": without(part(), "outcome")}), "the part 'commit' has no 'outcome'"),
        (whole(parts={"commit": part(outcome="fine")}), "the part 'commit' has the unknown outcome 'fine'"),
        (whole(parts={"commit": part(colour="red")}), "the part 'commit' has the unknown entry 'colour'"),
        (whole(parts={"commit": part(attempts=True)}), "'attempts' of the part 'commit' is bool"),
        (whole(parts={"commit": part(findings=["x"])}), "a finding of the part 'commit' is not an object"),
        (finding(kind="rumour"), "a finding of the part 'commit' is of the unknown kind 'rumour'"),
        (finding(kind="comparison"), "a finding of the part 'commit' has no 'theirs'"),
        (finding(values=["fast"]), "'values' in a finding of the part 'commit' has an entry of another type"),
        (finding(limit="1"), "'limit' of a finding of the part 'commit' is str"),
    ],
)
def test_a_damaged_file_is_refused_with_its_place(text: Any, says: str, tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_bytes(
        text if isinstance(text, bytes) else (text if isinstance(text, str) else json.dumps(text)).encode()
    )
    with pytest.raises(WrongResults) as refused:
        gpu_results.read(path)
    assert str(refused.value).startswith(f"cannot go on with {path}: {says}")
    assert "Remove it, or name another folder" in str(refused.value)


def test_a_run_with_few_parts_becomes_pages(tmp_path: Path) -> None:
    (tmp_path / "gpu.json").write_text(json.dumps(whole()))
    results = gpu_results.read(tmp_path / "gpu.json")
    assert results is not None
    pages = [text(results) for _page, _name, text in gpu_docs.PLACES]
    assert "| n |  | 1.000 s |" in pages[0]
    assert all("Python 3.12" in page and "not reached" in page for page in pages)


def test_no_page_is_written_if_one_has_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpu.json").write_text(json.dumps(whole()))
    good, bad = tmp_path / "good.md", tmp_path / "bad.md"
    good.write_text("<!-- gpu:begin -->\nold\n<!-- gpu:end -->\n")
    bad.write_text("a page")
    places = tuple((page, "gpu", gpu_docs.PLACES[0][2]) for page in (good, bad))
    monkeypatch.setattr(gpu_docs, "PLACES", places)
    monkeypatch.setattr(sys, "argv", ["gpu_docs.py", str(tmp_path / "gpu.json")])
    with pytest.raises(SystemExit, match="the page has no place for this text"):
        gpu_docs.main()
    assert "\nold\n" in good.read_text()


# --- interrupted ---------------------------------------------------------------------------------------


def _run(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> gpu_command.Run:
    program = folder / "part.py"
    program.write_text(source)
    monkeypatch.setitem(gpu_command.BY_NAME, "p", Part("p", "", str(program), usual_s=0.1, limit_s=60))
    options = argparse.Namespace(rehearse="cpu", results=folder, budget=100.0, again=False)
    return gpu_command.Run(options, dict(os.environ), Results(MACHINE, True))


def test_an_interruption_ends_the_part_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part is in a session of its own, so Ctrl-C does not reach it."""
    pids = []

    def interrupted(process: subprocess.Popen[bytes], _limit_s: float) -> bool:
        pids.append(process.pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_command, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _run(tmp_path, monkeypatch, "import time; time.sleep(600)").through(["p"])
    assert not Path(f"/proc/{pids[0]}").exists()
