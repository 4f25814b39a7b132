"""What flight recorders say together; on dumps that torch has written, and on ones that nobody should write."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.health.dumps import compared, compared_folder, parsed
from launcher.health.flight_recorder import NotADump, dump_of

RECORDED = Path(__file__).parent / "recorded"


def recorded(rank: int, kind: str = "pickle") -> bytes:
    """Of three ranks over Gloo; the last has not entered the fourth all-reduce."""
    return (RECORDED / f"behind.rank{rank}.{kind}").read_bytes()


def entry(sequence: int, op: str = "nccl:all_reduce", sizes: object = ((4,),), **more: Any) -> dict[str, Any]:
    return {
        "collective_seq_id": sequence,
        "is_p2p": False,
        "process_group": ("0", "default_pg"),
        "profiling_name": op,
        "input_sizes": sizes,
        "input_dtypes": ["Float"],
        "state": "scheduled",
        "retired": False,
        **more,
    }


def plain(*entries: dict[str, Any], ranks: str = "[0, 1, 2]") -> dict[str, Any]:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}
    return {"version": "2.10", "pg_config": config, "entries": list(entries)}


def words(*dumps: dict[str, Any]) -> list[str]:
    return compared([dump_of(rank, one) for rank, one in enumerate(dumps)])


DONE = entry(1, retired=True)


def test_recorded_dumps_name_the_rank_that_did_not_come() -> None:
    (found,) = compared([parsed(recorded(rank), rank) for rank in range(3)])
    assert re.fullmatch(
        r"rank 2: ranks 0 and 1 have waited for it for [\d.]+ s in all_reduce #4 \(10 x float32\); "
        "its last collective is #3",
        found,
    )


def test_both_of_torchs_formats_say_the_same() -> None:
    assert parsed(recorded(0, "json"), 0) == parsed(recorded(0), 0)


def test_another_collective_under_the_same_number() -> None:
    said = words(plain(DONE, entry(2)), plain(DONE, entry(2)), plain(DONE, entry(2, "nccl:broadcast")))
    assert said == [
        "rank 2 entered broadcast #2 (4 x float32), while ranks 0 and 1 entered all_reduce #2 (4 x float32)"
    ]


def test_another_shape_counts_where_shapes_must_be_one() -> None:
    other = entry(2, sizes=[[8]])
    assert words(plain(entry(2)), plain(entry(2)), plain(other)) == [
        "rank 2 entered all_reduce #2 (8 x float32), while ranks 0 and 1 entered all_reduce #2 (4 x float32)"
    ]
    gathers = [plain(entry(2, "nccl:all_gather", [[size]], retired=True)) for size in (4, 4, 8)]
    assert words(*gathers) == []


def test_all_are_there_and_it_does_not_end() -> None:
    assert words(*[plain(DONE, entry(2))] * 3) == [
        "ranks 0-2 wait in all_reduce #2 (4 x float32), which all ranks have entered: check network and GPUs"
    ]


def test_a_rank_whose_dump_is_not_there_is_in_doubt() -> None:
    said, doubt = words(*[plain(DONE, entry(2))] * 2)
    assert said.startswith("rank 2: ranks 0 and 1 have waited for it")
    assert doubt == "no dump of rank 2"


def test_what_is_over_is_no_finding() -> None:
    behind = plain(DONE)
    ahead = plain(DONE, entry(2, retired=True))
    assert words(ahead, behind, behind) == []  # a broadcast's root may be through before the others come
    send = entry(3, "nccl:send 0->1", is_p2p=True)
    assert words(plain(DONE, send), behind, behind) == []


class _Calls:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps({"entries": [_Calls()]}),
        pickle.dumps([1]),
        recorded(0)[:200],
        b"",
        b"{",
        json.dumps({"entries": [{"process_group": "?"}]}).encode(),
        json.dumps({"entries": [{**DONE, "input_sizes": [["x"]]}]}).encode(),
        json.dumps({"entries": [{**DONE, "collective_seq_id": math.inf}]}).encode(),
        json.dumps({"entries": [{**DONE, "time_created_ns": math.nan}]}).encode(),
        json.dumps({"entries": [{**DONE, "input_sizes": [[-math.inf]]}]}).encode(),
        json.dumps({"entries": [{**DONE, "input_sizes": [[10**300] * 64]}]}).encode(),
        json.dumps({"entries": [{**DONE, "input_sizes": [[2] * 100]}]}).encode(),
        b'{"entries": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        pickle.dumps({"entries": [{**DONE, "collective_seq_id": math.inf}]}),
    ],
)
def test_what_is_no_dump_is_refused(data: bytes) -> None:
    with pytest.raises(NotADump):
        parsed(data, 0)


@pytest.mark.parametrize("ranks", ["[" * 100_000 + "]" * 100_000, f"[{'9' * 4000}]", "[NaN]", "[true]", "{"])
def test_members_that_are_not_ranks_are_left_out(ranks: str) -> None:
    data = json.dumps(plain(DONE, ranks=ranks)).encode()
    assert [group.members for group in parsed(data, 0).groups] == [()]


def test_unknown_fields_and_versions_are_no_trouble() -> None:
    strange = copy.deepcopy(plain(DONE, entry(2)))
    strange |= {"version": "9.0", "later": [1], "pg_config": {"0": {"ranks": "?"}, "1": None}}
    assert words(strange, plain(DONE))[0].startswith("rank 1: rank 0 has waited for it")


def test_a_folder_of_many_nodes_is_read_as_one(tmp_path: Path) -> None:
    for rank in range(3):
        folder = tmp_path / f"node{rank % 2}" / str(rank)
        folder.mkdir(parents=True)
        (folder / f"flight-recorder-{rank}").write_bytes(recorded(rank))
    (tmp_path / "node0" / "0" / "flight-recorder.json").write_bytes(recorded(0, "json"))
    count, findings = compared_folder(str(tmp_path))
    assert count == 3
    assert [each[:7] for each in findings] == ["rank 2:"]
    command = [sys.executable, "-m", "launcher.health.dumps", str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert said == f"dumps of 3 ranks:\n{findings[0]}\n"
