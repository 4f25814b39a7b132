"""Translates an assignment into the environment of one rank: torchrun's variables exactly, and DDP_* in addition."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from launcher.settings.spec import LaunchSpec, timer_file
from launcher.template.contracts import (
    CHECKPOINT_REQUEST,
    DEBUG,
    GENERATION,
    JOINS,
    RANK_DIR,
    REDUNDANCY,
    RESUME_FILE,
    RESUME_PATH,
    SCRATCH,
    SHARE_COMPILED,
    TOPOLOGY,
)
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.types import Assignment, Recover, StoreAddress

_INTERFACE_OF = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True, slots=True)
class RankPlace:
    assignment: Assignment
    local_rank: int
    store: StoreAddress
    directory: str  # of this rank's logs
    scratch: str = ""  # of the node; exists as long as its agent

    @property
    def rank(self) -> int:
        return self.assignment.rank_offset + self.local_rank


def shared_env(spec: LaunchSpec, environ: Mapping[str, str], omp_threads: int = 0) -> dict[str, str]:
    """Return what all ranks of the node share. Set before torch is loaded, since OpenMP reads it then."""
    # 1, as torchrun sets it: after an error of NCCL torch's watchdog ends the process, also one that could be healed.
    # 0: the guard sees the error, and aborts the groups.
    handling = "0" if spec.job.recover is Recover.IN_PLACE else "1"
    env = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", handling)}
    if "OMP_NUM_THREADS" not in environ and (omp_threads or spec.nproc > 1):
        env["OMP_NUM_THREADS"] = str(omp_threads or 1)
    if spec.interface:  # ranks use the same interface as the agents
        env |= {name: spec.interface for name in _INTERFACE_OF if name not in environ}
    return env


def request_file(scratch: str, generation: int) -> str:
    """Return the path of the file that exists while a checkpoint is requested."""
    return f"{scratch}/checkpoint-{generation}"


def rank_env(spec: LaunchSpec, place: RankPlace, environ: Mapping[str, str]) -> dict[str, str]:
    a = place.assignment
    env = {
        "RANK": str(place.rank),
        "LOCAL_RANK": "0" if spec.virtual_local_rank else str(place.local_rank),
        "GROUP_RANK": str(a.node_rank),
        "ROLE_RANK": str(a.role_rank_offset + place.local_rank),
        "ROLE_NAME": a.role,
        "LOCAL_WORLD_SIZE": str(a.nproc),
        "WORLD_SIZE": str(a.world_size),
        "GROUP_WORLD_SIZE": str(a.n_nodes),
        "ROLE_WORLD_SIZE": str(a.role_world_size),
        "MASTER_ADDR": place.store.host,
        "MASTER_PORT": str(place.store.port),
        "TORCHELASTIC_RESTART_COUNT": str(a.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(a.max_restarts),
        "TORCHELASTIC_RUN_ID": spec.job.job_id,
        "TORCHELASTIC_USE_AGENT_STORE": str(place.store.kept),
        "TORCHELASTIC_ERROR_FILE": f"{place.directory}/error.json",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": spec.signals_asked,
        "DDP_JOB_ID": spec.job.job_id,
        GENERATION: str(a.generation),
        RANK_DIR: place.directory,
        "DDP_RESTART_COUNT": str(a.restart_count),
    }
    if a.in_place:
        env[JOINS] = "1"
    elif environ.get(JOINS):  # inherited from a rank in which this launcher runs
        env[JOINS] = ""
    if place.scratch:
        env[SCRATCH] = place.scratch
        env[CHECKPOINT_REQUEST] = request_file(place.scratch, a.generation)
    if spec.debug is not None:
        env[DEBUG] = spec.debug.of(place.rank)
    if spec.rank_timers:
        env["TORCHELASTIC_TIMER_FILE"] = timer_file(place.scratch, environ)
    if a.resume_path:
        env[RESUME_PATH] = a.resume_path
    elif environ.get(RESUME_PATH):  # the same
        env[RESUME_PATH] = ""
    if spec.resume_file:
        env[RESUME_FILE] = spec.resume_file
    elif environ.get(RESUME_FILE):
        env[RESUME_FILE] = ""
    if spec.share_compiled:
        env[SHARE_COMPILED] = spec.share_compiled
    if spec.redundancy:
        env[REDUNDANCY] = spec.redundancy
    if unit := _unit(spec, environ):
        env[TOPOLOGY] = unit
    if spec.virtual_local_rank:
        env["CUDA_VISIBLE_DEVICES"] = _only_device(place.local_rank, environ.get("CUDA_VISIBLE_DEVICES"))
    return env


def _unit(spec: LaunchSpec, environ: Mapping[str, str]) -> str:
    """Where the node is, for ranks that keep state for others; the NVLink domain is not a unit that fails together."""
    if spec.topology == "slurm":
        return "/".join(environ.get("SLURM_TOPOLOGY_ADDR", "").split(".")[:-1])
    return spec.topology if spec.topology != "nvlink" else ""


def continued_env(spec: LaunchSpec, place: RankPlace, environ: Mapping[str, str]) -> dict[str, str]:
    """Return what a rank that keeps its process changes in its environment: it joins no rank, the others join it."""
    return rank_env(spec, place, environ) | {JOINS: ""}


def _only_device(local_rank: int, visible: str | None) -> str:
    """From the devices that the agent may use, return the device of this rank."""
    if visible is None:
        return str(local_rank)
    devices = visible.split(",")
    return devices[local_rank] if local_rank < len(devices) else str(local_rank)


def resume_args(pattern: str, path: str) -> tuple[str, ...]:
    """Return what `--resume-arg` adds to the script's arguments if ranks before these have saved anything."""
    return tuple(word.replace("{path}", path) for word in shlex.split(pattern)) if pattern and path else ()


def rank_args(args: tuple[str, ...], local_rank: int) -> tuple[str, ...]:
    """Replace ${local_rank} in the script's arguments, and $$ with $, as torchrun does."""
    if not any("$" in arg for arg in args):
        return args
    from string import Template

    return tuple(Template(arg).safe_substitute(local_rank=local_rank) for arg in args)
