"""What flight recorders say together; on dumps that torch has written, and on ones that nobody should write."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.health.dumps import compared, compared_folder, parsed
from launcher.health.flight_recorder import Dump, NotADump, dump_of

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


# --- dumps of pending calls only -----------------------------------------------------------------------
#
# As torch writes them without finished calls. Each group counts its own calls.

GROUPS = {"0": (0, 1, 2, 3, 4, 5, 6, 7), "1": (0, 1, 2, 3), "2": (4, 5, 6, 7), "3": (0, 4), "4": (3, 7)}
OPS = ("all_reduce", "_all_gather_base", "_reduce_scatter_base", "all_to_all")


class Played:
    """Eight ranks call what a seed says. One stops to enter calls, or its GPU no longer finishes what it enters.

    A GPU works in the order of the calls. One that hangs may still do its part in some calls, which others finish.
    """

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        self.culprit, self.is_gpu = chance.randrange(8), chance.random() < 0.5
        self._parts_left = chance.randrange(1, 6) if self.is_gpu else 0
        plan = [(chance.choice(list(GROUPS)), chance.choice(OPS)) for _ in range(60)]
        self._waits = {rank: False for rank in range(8)}
        self._count = dict.fromkeys(GROUPS, 0)
        self._pending: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(8)}
        for at, (group, op) in enumerate(plan):
            self._call(group, op, is_failing=at >= 20)

    def _call(self, group: str, op: str, is_failing: bool) -> None:
        self._count[group] += 1
        members = GROUPS[group]
        fails = is_failing and self.culprit in members
        does_its_part = fails and self._parts_left > 0
        finishes = not any(self._waits[rank] for rank in members if rank != self.culprit)
        finishes = finishes and (does_its_part or not fails)
        self._parts_left -= does_its_part and finishes
        for rank in members:
            if finishes and not (fails and rank == self.culprit):
                continue
            if rank != self.culprit:
                self._waits[rank] = True
            elif fails and not self.is_gpu:
                continue
            names = {"process_group": (group, f"g{group}"), "input_sizes": [[8]]}
            self._pending[rank].append(entry(self._count[group], f"nccl:{op}", **names))

    def dumps(self) -> list[Dump]:
        config = {name: {"name": name, "desc": "", "ranks": str(list(of))} for name, of in GROUPS.items()}
        whole = {"version": "2.10", "pg_config": config}
        return [dump_of(rank, {**whole, "entries": self._pending[rank]}) for rank in range(8)]


def named(lines: list[str]) -> set[int]:
    return {
        int(found[1]) for line in lines if (found := re.match(r"rank (\d+)(?::| has not finished)", line))
    }


def test_a_rank_is_behind_if_others_have_finished_its_oldest_call() -> None:
    first = [dump_of(rank, plain(entry(4 if rank == 1 else 7), ranks="[0, 1, 2]")) for rank in range(3)]
    assert compared(first)[0].startswith(
        "rank 1 has not finished all_reduce #4 of group 0, which others (0, 2) have"
    )
    most = [dump_of(rank, plain(entry(7 if rank == 1 else 4), ranks="[0, 1, 2]")) for rank in range(3)]
    assert not any("has not finished" in line for line in compared(most))
    alone = [dump_of(rank, plain(entry(4 if rank == 1 else 7, "nccl:broadcast"))) for rank in range(3)]
    assert not any("has not finished" in line for line in compared(alone))
    whole = [dump_of(rank, plain(DONE, entry(4 if rank == 1 else 7))) for rank in range(3)]
    assert not any("has not finished" in line for line in compared(whole))


@pytest.mark.parametrize("is_gpu", [True, False])
def test_of_pending_calls_alone_the_culprit_is_named_and_no_other_rank(is_gpu: bool) -> None:
    jobs = [job for job in map(Played, range(200)) if job.is_gpu is is_gpu]
    assert [named(compared(job.dumps())) for job in jobs] == [{job.culprit} for job in jobs]
