"""What the comments of the wire schema state is what the code does: clients in other languages have only the schema."""

import re
from pathlib import Path

import grpc
import pytest

from rendezvous.access.auth import Role
from rendezvous.client.session_rules import SessionState, heartbeat_every_s
from rendezvous.diagnosing.stragglers import WINDOWS_TO_NAME
from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.service import calls
from rendezvous.service.agent_stream import MESSAGE_BYTES, ServiceLimits
from rendezvous.session_replay import SessionReplay
from rendezvous.store.protocol import KEYS_PER_JOB, VALUE_BYTES
from rendezvous.values.events import AgentJoined
from rendezvous.values.types import AgentId, JobSpec, NodeFacts

ROOT = Path(__file__).parents[2]
SCHEMA = (ROOT / "proto/rendezvous/v1/rendezvous.proto").read_text()
COMMENTS = " ".join(re.sub(r"^\s*//", "", line) for line in SCHEMA.splitlines() if "//" in line)
COMMENTS = re.sub(r"\s+", " ", COMMENTS)
RETIRED = {"sight", "sights", "pace", "paces", "telling", "owing", "charged", "moved", "era", "race", "still"}


def test_metadata_that_the_code_uses_are_listed() -> None:
    code = "".join(path.read_text() for path in (ROOT / "rendezvous").glob("[cvs]*/*.py"))
    used = set(re.findall(r"METADATA = \(?\s*\"([a-z-]+)\"", code)) | {"authorization"}
    assert len(used) >= 5
    assert {name for name in used if f"{name}: " not in SCHEMA} == set()


def test_status_codes_that_calls_end_with_are_explained() -> None:
    source = Path(calls.__file__).read_text()
    ends = {code for code in grpc.StatusCode if f"code.{code.name}" in source} - {
        grpc.StatusCode.OK,
        grpc.StatusCode.CANCELLED,  # by the client itself
    }
    assert len(ends) >= 7
    assert {code.name for code in ends if f"//   {code.name} " not in SCHEMA} == set()


@pytest.mark.parametrize(
    ("statement", "holds"),
    [
        ("a message to the service has at most 1 MiB", MESSAGE_BYTES == 1 << 20),
        ("values at most 64 KiB", VALUE_BYTES == 64 << 10),
        ("at most 1,024 values", KEYS_PER_JOB == 1024),
        ("1,024 barriers", ServiceLimits().barriers_per_job == 1024),
        ("in three consecutive windows", WINDOWS_TO_NAME == 3),
    ],
)
def test_a_number_in_a_comment_is_that_of_the_code(statement: str, holds: bool) -> None:
    assert statement in COMMENTS
    assert holds


def test_heartbeats_come_every_quarter_of_the_lease() -> None:
    for lease_s, nodes, every_s in (
        (2.0, 1, 0.5),
        (15.0, 3000, 1.0),
        (15.0, 6000, 2.0),
        (15.0, 16_000, 3.0),
        (2.0, 16_000, 0.5),
    ):
        spec = JobSpec("job", nodes, nodes, lease_s=lease_s)
        joined = AgentJoined(AgentId("a", "1"), spec, NodeFacts("a", "a", 1))
        state = SessionState(("x:1",), 60.0, 0.0, replay=SessionReplay(joined=joined))
        assert heartbeat_every_s(state) == every_s
    assert "sent nothing for a second, or a quarter of a shorter lease" in COMMENTS
    assert "Of a job of more than 3,000 nodes, all agents together send 3,000 in a second" in COMMENTS
    assert "but each one every 3 s at least" in COMMENTS


def test_every_role_is_described() -> None:
    assert {role for role in Role if f"`{role}` may use" not in COMMENTS} == set()


def test_names_of_the_wire_are_not_retired_words() -> None:
    names = {name.lower() for name in pb.DESCRIPTOR.message_types_by_name}
    for message in pb.DESCRIPTOR.message_types_by_name.values():
        names |= {word for field in message.fields for word in field.name.split("_")}
    assert names & RETIRED == set()
