"""What has changed since a snapshot: applied to it, it gives exactly the state that was written."""

from __future__ import annotations

import json
import random
import zlib
from dataclasses import replace

import pytest

from rendezvous.rounds.snapshot import (
    SnapshotUnreadable,
    apply_changes,
    are_changes,
    decode_state,
    encode_changes,
    encode_state,
)
from rendezvous.values.frozen_map import FrozenMap
from rendezvous.values.job_state import Exclusion, JobState, Member, Phase
from rendezvous.values.types import (
    AgentId,
    Cause,
    Decision,
    DecisionKind,
    FailureClass,
    JobSpec,
    NodeFacts,
    Placement,
    World,
)

_ID = b"snapshot"


def _member(number: int) -> Member:
    agent = AgentId(f"node{number}", "1")
    return Member(agent, NodeFacts(agent.node, "10.0.0.1", 8), number, number)


def large(nodes: int) -> JobState:
    members = [_member(i) for i in range(nodes)]
    places = (Placement(m.agent, m.facts, i, 8 * i, 8 * i) for i, m in enumerate(members))
    empty = JobState(spec=JobSpec("job", nodes, nodes), phase=Phase.RUNNING, generation=1)
    return replace(
        empty,
        world=World(1, tuple(places)),
        members=FrozenMap((m.agent.node, m) for m in members),
        pending=FrozenMap((m.agent.node, True) for m in members),
        leases=FrozenMap((m.agent.node, 0.0) for m in members),
    )


def changed(state: JobState, lucky: random.Random, number: int) -> JobState:
    """One change of those that decisions make."""
    node = f"node{lucky.randrange(2 * len(state.members))}"
    decision = Decision(DecisionKind.RESTART, f"reason {number}", state.generation)
    match lucky.randrange(6):
        case 0:
            return replace(state, members=state.members.minus(node), pending=state.pending.minus(node))
        case 1:
            return replace(state, members=state.members.plus(node, _member(number)))
        case 2:
            return replace(state, excluded=state.excluded.plus(node, Exclusion("broken", float(number))))
        case 3:
            cause = Cause(node, number, 0, FailureClass.EXIT_CODE, "exit code 1", 1)
            return replace(state, causes=state.causes.plus(number, cause), decision=decision)
        case 4:
            return replace(state, decisions=(*state.decisions, decision), restarts_used=number)
        case _:
            leases = FrozenMap((n, float(number)) for n in state.members)
            return replace(state, phase=Phase.STOPPING, leases=leases)


def _as_read(state: JobState) -> JobState:
    """Leases are not written: whoever reads the state renews them."""
    return replace(state, leases=FrozenMap((node, state.as_of) for node in state.members))


@pytest.mark.parametrize("seed", range(8))
def test_a_state_is_read_as_it_was_written(seed: int) -> None:
    lucky = random.Random(seed)
    state = large(512)
    for node in ("node3", "node4", "node5"):  # a later return changes the order
        state = replace(state, members=state.members.minus(node))
    base = state
    stored = decode_state(encode_state(base))
    kept = 0
    for number in range(60):
        state = replace(changed(state, lucky, number), as_of=float(number))
        data = encode_changes(base, _ID, state)
        if data is None:
            break
        kept += 1
        found = apply_changes(data, _ID, stored)
        assert found == _as_read(state)
        for name in ("members", "pending", "excluded", "causes"):
            assert list(getattr(found, name).items()) == list(getattr(state, name).items())  # in order, too
    assert kept > 5


def test_the_change_of_one_node_is_a_hundredth_of_the_state() -> None:
    base = large(4096)
    gone = replace(
        base, members=base.members.minus("node17"), decisions=(Decision(DecisionKind.RESTART, "r", 1),)
    )
    data = encode_changes(base, _ID, gone)
    assert data is not None
    assert 50 * len(data) < len(encode_state(base))


def test_much_that_has_changed_is_written_as_a_whole() -> None:
    base = large(512)
    members = FrozenMap((node, replace(member, node_rank=None)) for node, member in base.members.items())
    assert encode_changes(base, _ID, replace(base, members=members)) is None


def _rewritten(data: bytes, **parts: object) -> bytes:
    magic, _, packed = data.partition(b"\n")
    document = json.loads(zlib.decompress(packed)) | parts
    return magic + b"\n" + zlib.compress(json.dumps(document).encode())


def test_what_does_not_fit_is_refused() -> None:
    base = large(300)
    data = encode_changes(base, _ID, replace(base, restarts_used=3))
    assert data is not None
    assert are_changes(data)
    assert not are_changes(encode_state(base))
    with pytest.raises(SnapshotUnreadable, match="belong to snapshot"):
        apply_changes(data, b"another!", base)
    with pytest.raises(SnapshotUnreadable, match="format 3; this version reads format 2"):
        decode_state(data)  # as an older release does
    row = base.members["node1"]
    cells = [["node1", "1"], ["node1", "10.0.0.1", 8], 1, 1, None]
    assert row.node_rank == 1
    for wrong in (
        {"base": None},
        {"fields": {"leases": []}},
        {"fields": {"restarts_used": "3"}},
        {"fields": {"no_such": 1}},
        {"maps": {"members": [["no such node"], []]}},
        {"maps": {"members": [[], [["node1", cells[:3]]]]}},
        {"maps": {"pending": [["node1"]]}},
        {"maps": {"pending": [[1], []]}},
        {"maps": {"pending": [[], [["node1", 1]]]}},
        {"maps": {"world": [[], []]}},
        {"maps": {"pending": 3}},
        {"schema": {}, "fields": {"timers": []}},
    ):
        with pytest.raises(SnapshotUnreadable):
            apply_changes(_rewritten(data, **wrong), _ID, base)
    for cut in (0, 5, 12, len(data) - 3):
        with pytest.raises(SnapshotUnreadable):
            apply_changes(data[:cut], _ID, base)
