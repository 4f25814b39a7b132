"""The oldest versions of protobuf and grpcio that pyproject.toml promises, and the newest, do work."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rendezvous.pb import etcd_pb2, rendezvous_pb2

ROOT = Path(__file__).parents[2]
GENERATED = sorted((ROOT / "rendezvous/pb").glob("*_pb2.py"))
TESTED_WITH = ("pytest", "pytest-timeout", "hypothesis", "psutil")
# What speaks protobuf or gRPC, without torch: messages, health checks, reflection, a service and its agents, etcd.
TESTS = (
    "tests/core/test_codec.py",
    "tests/core/test_wire_comments.py",
    "tests/core/test_grpc_health.py",
    "tests/core/test_ddpctl.py",
    "tests/shell/test_auth_gate.py",
    "tests/shell/test_client_session.py",
    "tests/wings/etcd/test_etcd_owners.py",
    "tests/shell/test_scratchpad.py",
    "tests/shell/test_service.py",
    "tests/shell/test_two_nodes_join.py",
)


def floor_of(name: str) -> tuple[int, ...]:
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (found,) = (re.fullmatch(rf"{name}>=([\d.]+)", each) for each in needs if each.startswith(name))
    assert found, "a floor, and nothing that keeps newer versions away"
    return tuple(map(int, found[1].split(".")))


def pinned(*names: str) -> list[str]:
    text = (ROOT / "requirements/test.txt").read_text()
    found = dict(re.findall(r"^([\w.-]+)==([\w.]+)", text, re.MULTILINE))
    return [f"{name}=={found[name]}" for name in names]


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: path.name)
def test_the_generated_code_is_not_newer_than_the_oldest_protobuf(path: Path) -> None:
    """Code of a newer compiler refuses an older protobuf, whatever is in the message."""
    version = re.search(r"^# Protobuf Python Version: (\d+)\.(\d+)\.", path.read_text(), re.MULTILINE)
    assert version
    assert (int(version[1]), int(version[2])) <= floor_of("protobuf"), "make proto"


def test_each_schema_is_the_one_in_the_generated_code() -> None:
    """Its names and numbers, that is; `make nightly` runs the compiler."""
    for generated in (rendezvous_pb2, etcd_pb2):
        name = generated.DESCRIPTOR.name
        text = (ROOT / "proto" / name).read_text()
        declared = {(found[1], int(found[2])) for found in re.finditer(r"(\w+) = (\d+)(?: \[.*\])?;", text)}
        assert numbers_in(generated.DESCRIPTOR) == declared, f"{name}: make proto"


def numbers_in(scope: Any) -> set[tuple[str, int]]:
    """The fields and the values of all types below this file or message."""
    types = getattr(scope, "message_types_by_name", None) or getattr(scope, "nested_types_by_name", {})
    found = {
        (value.name, value.number) for each in scope.enum_types_by_name.values() for value in each.values
    }
    found |= {(each.name, each.number) for each in getattr(scope, "fields", ())}
    return found.union(*(numbers_in(each) for each in types.values()))


@pytest.mark.nightly(instead="::test_each_schema_is_the_one_in_the_generated_code")
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="this compiler has no wheel for Python 3.14")
def test_the_generated_code_is_in_step_with_the_schema(tmp_path: Path) -> None:
    subprocess.run(["make", "-s", "generator", f"PYTHON={sys.executable}"], cwd=ROOT, check=True, timeout=200)
    generator = ROOT / ".venv-generator/bin/python"
    subprocess.run([ROOT / "proto/generate.sh", generator, tmp_path], check=True, timeout=60)
    made = sorted(path.name for path in tmp_path.iterdir())
    assert {path.name for path in GENERATED} <= set(made)
    for name in made:
        assert (tmp_path / name).read_text() == (ROOT / "rendezvous/pb" / name).read_text(), (
            f"{name}: make proto"
        )


@pytest.mark.nightly(instead="::test_the_generated_code_is_not_newer_than_the_oldest_protobuf")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "versions",
    [
        ("protobuf==5.29.1", "grpcio==1.74.0"),
        ("protobuf==6.30.*", "grpcio==1.76.*"),
        ("protobuf", "grpcio"),
    ],
    ids=["oldest", "between", "newest"],
)
def test_the_rendezvous_works_with(versions: tuple[str, ...], tmp_path: Path) -> None:
    assert (floor_of("protobuf"), floor_of("grpcio")) == ((5, 29, 1), (1, 74)), "the first case"
    python = tmp_path / "env/bin/python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True, timeout=100)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "-q", "install"]
    subprocess.run([*pip, *versions, *pinned(*TESTED_WITH)], check=True, timeout=300)
    words = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not nightly", *TESTS]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
