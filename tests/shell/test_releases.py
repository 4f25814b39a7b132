"""The last release and this tree together: agents, service, ddpctl and stored jobs of both work with each other.

tests/released/ holds the pure wheel of the last release. docs/compatibility.md has the policy that this proves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
from served import serving

from rendezvous.values.contracts import VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping

RELEASED = Path(__file__).resolve().parents[1] / "released"
RELEASED_VERSION = next(RELEASED.glob("*.whl")).name.split("-")[1]
Side = Literal["released", "present"]
Environments = dict[Side, dict[str, str]]
_COMMAND = "import sys, _ddp_launch_entry as entry; sys.exit(getattr(entry, sys.argv.pop(1))())"
_FAILS_ONCE = ("--max-restarts", "1", "--no-python", "sh", "-c", 'test "$TORCHELASTIC_RESTART_COUNT" = 1')
_TIME_S = 100.0


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Environments:
    """The environment that makes an interpreter import the one or the other."""
    (wheel,) = RELEASED.glob("*.whl")
    folder = tmp_path_factory.mktemp("released")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return {
        "released": {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(folder)},
        "present": {"PYTHONSAFEPATH": "1"},
    }


def start(entry: str, *words: str, env: Mapping[str, str]) -> subprocess.Popen[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("DDP_", "PET_"))}
    command = [sys.executable, "-c", _COMMAND, entry, *words]
    return subprocess.Popen(
        command, env=inherited | dict(env), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(entry: str, *words: str, env: Mapping[str, str]) -> tuple[int, str, str]:
    with start(entry, *words, env=env) as process:
        out, err = process.communicate(timeout=_TIME_S)
    return process.returncode, out, err


def node(endpoint: str, job_id: str, *words: str, env: Mapping[str, str]) -> subprocess.Popen[str]:
    where = ("--nnodes", "2", "--nproc-per-node", "1", "--preflight", "off", "--rendezvous", endpoint)
    return start("ddp_launch", *where, "--rdzv-id", job_id, *words, env=env)


def status(endpoint: str, job_id: str, env: Mapping[str, str]) -> dict[str, object]:
    code, out, err = run("ddpctl", "--rendezvous", endpoint, "-o", "json", "status", job_id, env=env)
    assert code == 0, err
    found: dict[str, object] = json.loads(out)["summary"]
    return found


def test_the_environments_import_what_they_should(sides: Environments) -> None:
    assert RELEASED_VERSION != VERSION
    for side, version in (("released", RELEASED_VERSION), ("present", VERSION)):
        assert run("ddpctl", "--version", env=sides[side])[1] == f"ddpctl {version}\n"


@pytest.mark.parametrize(
    ("service", "agents"),
    [("released", "present"), pytest.param("present", "released", marks=pytest.mark.nightly)],
)
def test_a_job_restarts_and_ends_and_its_history_is_read(
    service: Side, agents: Side, sides: Environments, tmp_path: Path
) -> None:
    store = ("--store", f"file:{tmp_path}/jobs")
    with serving(*store, env=sides[service]) as served:
        nodes = [node(served.endpoint, "job", *_FAILS_ONCE, env=sides[agents]) for _ in range(2)]
        ended = [process.communicate(timeout=_TIME_S) for process in nodes]
        assert [process.returncode for process in nodes] == [0, 0], ended
        seen = status(served.endpoint, "job", sides[agents])
        otherwise = status(served.endpoint, "job", sides[service])
        known_to_both = seen.keys() & otherwise.keys()  # the later release shows fields that it has added
        assert known_to_both in (seen.keys(), otherwise.keys())
        assert [seen[name] for name in known_to_both] == [otherwise[name] for name in known_to_both]
    with serving(*store, env=sides["present"]) as other:  # reads the store that the first has written
        kept = status(other.endpoint, "job", sides[agents])
        assert kept == seen
        assert (kept["phase"], kept["restarts"]) == ("PHASE_ENDED", 1)


_FIELDS = """
import json
from rendezvous.pb import rendezvous_pb2 as pb
def fields(messages):
    for message in messages:
        for field in message.fields:
            yield f"{message.full_name}.{field.name}", [field.number, field.type]
        yield from fields(message.nested_types)
proto = __import__("google.protobuf.descriptor_pb2", fromlist=["x"]).FileDescriptorProto()
pb.DESCRIPTOR.CopyToProto(proto)
taken = {f"{pb.DESCRIPTOR.package}.{m.name}": [*m.reserved_name] for m in proto.message_type}
enums = {f"{e.full_name}.{v.name}": v.number for e in pb.DESCRIPTOR.enum_types_by_name.values() for v in e.values}
print(json.dumps([dict(fields(pb.DESCRIPTOR.message_types_by_name.values())), taken, enums]))
"""


def wire_of(env: Mapping[str, str]) -> tuple[dict[str, list[int]], dict[str, list[str]], dict[str, int]]:
    out = subprocess.run(
        [sys.executable, "-c", _FIELDS], env={**os.environ, **env}, check=True, capture_output=True
    )
    fields, reserved, enums = json.loads(out.stdout)
    return fields, reserved, enums


def test_fields_of_the_wire_keep_their_numbers_or_are_reserved(sides: Environments) -> None:
    before, _, enums_before = wire_of(sides["released"])
    now, reserved, enums = wire_of(sides["present"])
    for name, number_and_type in before.items():
        message, _, field = name.rpartition(".")
        assert now.get(name) == number_and_type or field in reserved[message], name
    assert enums_before.items() <= enums.items()
