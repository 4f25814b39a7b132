"""An assignment as environment variables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.health import flight_recorder
from launcher.ranks.worker_env import (
    RankPlace,
    continued_env,
    rank_args,
    rank_env,
    request_file,
    resume_args,
    shared_env,
)
from launcher.settings.spec import EntryKind, EntryPoint, LaunchSpec
from rendezvous.values.types import Assignment, JobSpec, Recover, StoreAddress

SPEC = LaunchSpec(EntryPoint(EntryKind.SCRIPT, "train.py"), JobSpec("run-1"), nproc=2)
ASSIGNMENT = Assignment(
    generation=3,
    node_rank=1,
    n_nodes=2,
    rank_offset=4,
    nproc=2,
    world_size=6,
    role="trainer",
    role_rank_offset=1,
    role_world_size=3,
    restart_count=2,
    max_restarts=5,
    store_host="a",
)
PLACE = RankPlace(ASSIGNMENT, 1, StoreAddress("a", 29500), "/logs/rank_5")


def test_every_variable_of_a_rank() -> None:
    assert rank_env(SPEC, PLACE, {}) == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "2",
        "ROLE_NAME": "trainer",
        "ROLE_WORLD_SIZE": "3",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "5",
        "TORCHELASTIC_RUN_ID": "run-1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "/logs/rank_5/error.json",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "DDP_JOB_ID": "run-1",
        "DDP_GENERATION": "3",
        "DDP_RANK_DIR": "/logs/rank_5",
        "DDP_RESTART_COUNT": "2",
    }


def test_where_a_checkpoint_is_asked_for_is_told_with_the_scratch_folder() -> None:
    env = rank_env(SPEC, replace(PLACE, scratch="/dev/shm/mine"), {})
    assert env["DDP_SCRATCH"] == "/dev/shm/mine"
    assert env["DDP_CHECKPOINT_REQUEST"] == request_file("/dev/shm/mine", 3)


def test_ranks_talk_where_the_agents_do_unless_they_were_told_otherwise() -> None:
    spec = replace(SPEC, interface="ib0")
    env = shared_env(spec, {"NCCL_SOCKET_IFNAME": "eth"})
    assert env["GLOO_SOCKET_IFNAME"] == "ib0"
    assert "NCCL_SOCKET_IFNAME" not in env


def test_rank_0_hosts_the_store_where_nobody_keeps_it() -> None:
    place = replace(PLACE, store=StoreAddress("a", 29500, kept=False))
    assert rank_env(SPEC, place, {})["TORCHELASTIC_USE_AGENT_STORE"] == "False"


@pytest.mark.parametrize(
    ("visible", "device"), [(None, "1"), ("4,7", "7"), ("GPU-a,GPU-b", "GPU-b"), ("4", "1")]
)
def test_virtual_local_rank_sees_one_device(visible: str | None, device: str) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    env = rank_env(replace(SPEC, virtual_local_rank=True), PLACE, environ)
    assert (env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"]) == ("0", device)


@pytest.mark.parametrize(
    ("nproc", "environ", "bound", "threads"),
    [
        (1, {}, 0, None),
        (2, {}, 0, "1"),
        (2, {"OMP_NUM_THREADS": "6"}, 0, None),
        (2, {}, 4, "4"),
        (1, {}, 4, "4"),
        (2, {"OMP_NUM_THREADS": "6"}, 4, None),
    ],
)
def test_openmp_threads(nproc: int, environ: dict[str, str], bound: int, threads: str | None) -> None:
    assert shared_env(replace(SPEC, nproc=nproc), environ, bound).get("OMP_NUM_THREADS") == threads


def test_a_choice_about_nccl_errors_is_kept() -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    assert shared_env(SPEC, {})[name] == "1"
    assert shared_env(SPEC, {name: "3"})[name] == "3"
    heals = replace(SPEC, job=replace(SPEC.job, recover=Recover.IN_PLACE))
    assert shared_env(heals, {})[name] == "0"  # else torch would end the ranks that are to be healed
    assert shared_env(heals, {name: "3"})[name] == "3"


def test_nccl_is_told_only_what_its_user_has_not_said() -> None:
    told = flight_recorder.shared({}) | flight_recorder.of_rank("/logs/5", "/dev/shm/mine", {})
    assert told["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] == "500"
    assert told["TORCH_FR_DUMP_TEMP_FILE"] == "/logs/5/flight-recorder-"
    assert told["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] == "/dev/shm/mine/flight-recorder-pipe-"
    assert not any(flight_recorder.shared(told) | flight_recorder.of_rank("/logs/5", "/dev/shm/mine", told))
    assert set(told) == {name for name, *_ in (*flight_recorder.SHARED, *flight_recorder.OF_RANK)}
    former = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "9", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/tmp/x"}
    assert "TORCH_FR_BUFFER_SIZE" not in flight_recorder.shared(former)
    assert "TORCH_FR_DUMP_TEMP_FILE" not in flight_recorder.of_rank("/logs/5", "", former)


def test_local_rank_in_arguments() -> None:
    args = ("--rank=${local_rank}", "$local_rank", "$$5", "${other}", "plain")
    assert rank_args(args, 3) == ("--rank=3", "3", "$5", "${other}", "plain")
    assert rank_args(("a",), 3) == ("a",)


def test_what_ranks_before_have_saved() -> None:
    saved = replace(PLACE, assignment=replace(ASSIGNMENT, resume_path="/a b/c.pt"))
    assert rank_env(SPEC, saved, {})["DDP_RESUME_PATH"] == "/a b/c.pt"
    assert rank_env(SPEC, PLACE, {"DDP_RESUME_PATH": "of another job"})["DDP_RESUME_PATH"] == ""
    assert resume_args("--ckpt {path} --dir='{path}/x'", "/a b/c.pt") == (
        "--ckpt",
        "/a b/c.pt",
        "--dir=/a b/c.pt/x",
    )
    assert rank_env(replace(SPEC, resume_file="/f"), PLACE, {})["DDP_RESUME_FILE"] == "/f"
    assert rank_env(SPEC, PLACE, {"DDP_RESUME_FILE": "of another job"})["DDP_RESUME_FILE"] == ""
    assert resume_args("--ckpt {path}", "") == resume_args("", "/c.pt") == ()


def test_the_redundancy_of_commits_and_where_the_node_is() -> None:
    assert not {"DDP_REDUNDANCY", "DDP_TOPOLOGY"} & set(rank_env(SPEC, PLACE, {}))
    env = rank_env(replace(SPEC, redundancy="code:6+2", topology="pod1/rack7"), PLACE, {})
    assert (env["DDP_REDUNDANCY"], env["DDP_TOPOLOGY"]) == ("code:6+2", "pod1/rack7")
    slurm = {"SLURM_TOPOLOGY_ADDR": "spine1.leaf4.node12"}
    assert rank_env(replace(SPEC, topology="slurm"), PLACE, slurm)["DDP_TOPOLOGY"] == "spine1/leaf4"
    assert "DDP_TOPOLOGY" not in rank_env(replace(SPEC, topology="slurm"), PLACE, {})
    assert "DDP_TOPOLOGY" not in rank_env(replace(SPEC, topology="nvlink"), PLACE, {})


def test_a_new_rank_of_a_world_in_place_joins_and_one_that_continues_does_not() -> None:
    in_place = replace(PLACE, assignment=replace(ASSIGNMENT, in_place=True))
    assert rank_env(SPEC, in_place, {}) == rank_env(SPEC, PLACE, {}) | {"DDP_JOINS": "1"}
    assert continued_env(SPEC, in_place, {}) == rank_env(SPEC, PLACE, {}) | {"DDP_JOINS": ""}


def test_a_job_inside_of_a_rank_that_joins_does_not_join() -> None:
    assert rank_env(SPEC, PLACE, {"DDP_JOINS": "1"})["DDP_JOINS"] == ""
