"""The environment of a rank, read: what a launcher says, and what cannot be meant."""

from __future__ import annotations

import pytest

from ddp.groups.rank_info import (
    ALONE,
    InitError,
    RankInfo,
    device_index,
    known_backend,
    parse_rank_info,
    seconds,
)

FULL = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def test_as_a_launcher_says() -> None:
    seat = parse_rank_info(FULL)
    assert seat == RankInfo(5, 8, 1, 4, 1, launched=True)


def test_alone_without_a_launcher() -> None:
    assert parse_rank_info({"MASTER_ADDR": "left over", "PATH": "/bin"}) == ALONE


def test_what_torch_can_do_without_is_worked_out() -> None:
    """Some launchers say only what torch insists on."""
    seat = parse_rank_info(
        {name: FULL[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    )
    assert seat == RankInfo(5, 8, 5, 8, 0, launched=True)


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
@pytest.mark.parametrize("empty", [False, True])
def test_half_a_launcher_is_a_mistake(missing: str, empty: bool) -> None:
    environ = {name: value for name, value in FULL.items() if name != missing}
    with pytest.raises(InitError, match=f": {missing}\\. .*ddp-launch"):
        parse_rank_info(environ | ({missing: ""} if empty else {}))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("RANK", "8", "from 0 to 7 (WORLD_SIZE=8)"),
        ("RANK", "-1", "from 0 to 7"),
        ("RANK", "one", "from 0 to 7"),
        ("RANK", "²", "from 0 to 7"),
        ("WORLD_SIZE", "0", "1 or more"),
        ("MASTER_PORT", "0", "from 1 to 65535"),
        ("LOCAL_WORLD_SIZE", "9", "from 1 to 8"),
    ],
)
def test_what_cannot_be_meant(name: str, text: str, words: str) -> None:
    with pytest.raises(InitError) as raised:
        parse_rank_info(FULL | {name: text})
    assert words in str(raised.value)
    assert name in str(raised.value)


def test_devices() -> None:
    assert device_index(RankInfo(5, 8, 1, 4, 1, True), 4, "cuda") == 1
    assert device_index(RankInfo(5, 8, 3, 4, 1, True), 1, "cuda") == 0, "its own, the only one that it sees"
    with pytest.raises(InitError, match=r"cuda.*LOCAL_RANK=3.*--nproc-per-node"):
        device_index(RankInfo(5, 8, 3, 4, 1, True), 2, "cuda")


def test_backends() -> None:
    known = ["gloo", "nccl"]
    assert known_backend("cpu:gloo,cuda:NCCL", known) == "cpu:gloo,cuda:nccl"
    with pytest.raises(InitError, match=r"'glo'.*gloo, nccl"):
        known_backend("glo", known)


@pytest.mark.parametrize("text", ["0", "-1", "soon", "inf", "nan"])
def test_a_timeout_is_a_time(text: str) -> None:
    assert seconds("2.5", "DDP_TIMEOUT_S") == 2.5
    with pytest.raises(InitError, match="DDP_TIMEOUT_S"):
        seconds(text, "DDP_TIMEOUT_S")
