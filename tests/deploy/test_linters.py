"""Linters of files that no compiler reads; checkov, which is a large one, runs by `make lint-deploy`."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import linting
import pytest
import yaml

if TYPE_CHECKING:
    from collections.abc import Callable

LINTERS: dict[str, tuple[Callable[[list[Path]], list[str]], list[Path], str, str]] = {
    "hadolint": (linting.hadolint, linting.dockerfiles(), "FROM debian\nRUN cd /tmp && ls\n", "DL3006"),
    "shellcheck": (linting.shellcheck, linting.scripts(), "#!/bin/bash\nrm $1\n", "SC2086"),
    "yamllint": (linting.yamllint, [linting.DEPLOY], "a: 1\na: 2\n", "key-duplicates"),
}


def found(command: list[str]) -> tuple[int, str]:
    if not Path(command[0]).exists():
        pytest.skip(f"{Path(command[0]).name} is not built for this machine")
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("name", LINTERS)
def test_a_linter_is_silent(name: str) -> None:
    linter, files, _, _ = LINTERS[name]
    assert files
    assert found(linter(files)) == (0, "")


@pytest.mark.parametrize("name", LINTERS)
def test_a_linter_speaks_up(name: str, tmp_path: Path) -> None:
    linter, _, spoilt, words = LINTERS[name]
    (tmp_path / "spoilt.yaml").write_text(spoilt)
    code, text = found(linter([tmp_path / "spoilt.yaml"]))
    assert code != 0
    assert words in text


def test_what_the_large_linter_may_not_say_is_explained() -> None:
    """Each check that checkov is told to leave out has its reason above it."""
    lines = (linting.DEPLOY / ".checkov.yaml").read_text().splitlines()
    left_out = yaml.safe_load("\n".join(lines))["skip-check"]
    assert left_out
    for check in left_out:
        (at,) = (number for number, line in enumerate(lines) if line.strip() == f"- {check}")
        assert len(lines[at - 1].strip()) > 20
        assert lines[at - 1].strip().startswith("#"), check
