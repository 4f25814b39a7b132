"""The conda recipe says what pyproject.toml says."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
import yaml
from tidy import ROOT

PATH = ROOT / "deploy/conda/recipe.yaml"


@pytest.fixture
def recipe() -> dict[str, Any]:
    return yaml.safe_load(PATH.read_text())  # type: ignore[no-any-return]


@pytest.fixture
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def normalized(requirements: list[str]) -> set[str]:
    return {re.sub(r"\s", "", each).replace("pytorch", "torch") for each in requirements}


def test_version_licence_and_summary(recipe: dict[str, Any], project: dict[str, Any]) -> None:
    ours = project["project"]
    assert recipe["context"]["version"] == ours["version"]
    assert recipe["about"]["license"] == ours["license"]
    assert recipe["about"]["summary"] == ours["description"]
    assert (PATH.parent / recipe["source"]["path"] / recipe["about"]["license_file"]).exists()


def test_requirements(recipe: dict[str, Any], project: dict[str, Any]) -> None:
    needs, ours = recipe["requirements"], project["project"]
    python = f"python{ours['requires-python']}"
    assert normalized(needs["run"]) == normalized([python, *ours["dependencies"]])
    assert normalized(needs["run_constraints"]) == normalized(ours["optional-dependencies"]["torch"])
    assert normalized(needs["host"]) == normalized([python, "pip", *project["build-system"]["requires"]])


def test_commands(recipe: dict[str, Any], project: dict[str, Any]) -> None:
    listed = dict(each.split(" = ") for each in recipe["build"]["python"]["entry_points"])
    assert listed == project["project"]["scripts"]
    (script,) = (each["script"] for each in recipe["tests"] if "script" in each)
    assert {words.split()[0] for words in script} == listed.keys()
