"""Parse the rank, local rank and world size of this process from a mapping of environment variables (pure functions).

The variables are those of torchrun. A script without a launcher has none of them and runs with world size 1. A script
that mpirun has started gets these numbers from MPI. If only some of the variables are set, that is an error: otherwise
the ranks would wait for each other forever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ddp.telemetry.coded import CodedError

# --- backends --------------------------------------------------------------------------------------
#
# The choice of a backend, and the layout of ranks on hosts (pure functions).


@dataclass(frozen=True, slots=True)
class HostLayout:
    """The ranks of a group by host; hosts in the order of their lowest ranks."""

    hosts: tuple[tuple[int, ...], ...]
    rank: int

    @property
    def host(self) -> int:
        return next(number for number, ranks in enumerate(self.hosts) if self.rank in ranks)

    @property
    def here(self) -> tuple[int, ...]:
        return self.hosts[self.host]

    @property
    def member(self) -> int:
        return self.here.index(self.rank)

    @property
    def leaders(self) -> int:
        """How many ranks of each host reduce a slice and send it to other hosts:

        the ranks of the host with the fewest.
        """
        return min(len(ranks) for ranks in self.hosts)

    @property
    def is_leader(self) -> bool:
        return len(self.hosts) > 1 and self.member < self.leaders

    def leader_at(self, host: int) -> int:
        """Return the rank on another host that reduces the same slice as this one."""
        return self.hosts[host % len(self.hosts)][self.member]


def layout(host_keys: Sequence[str], rank: int) -> HostLayout:
    hosts: dict[str, list[int]] = {}
    for number, key in enumerate(host_keys):
        hosts.setdefault(key, []).append(number)
    return HostLayout(tuple(tuple(ranks) for ranks in hosts.values()), rank)


def choose(world_size: int, local_world_size: int, has_native: bool) -> str:
    """The fastest backend for CPU tensors (docs/performance.md), from facts that are the same on all ranks."""
    if not has_native:
        return "gloo"
    return "shm" if local_world_size == world_size else "hier"


# --- the rank --------------------------------------------------------------------------------------

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_CURE = (
    f"Start the script with ddp-launch, or set {', '.join(_NEEDED)}, or unset RANK and WORLD_SIZE to run with "
    "world size 1"
)


class InitError(CodedError, RuntimeError):
    """A process group cannot be created with this environment or these arguments."""

    code = "DDP-7002"


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The position of this process in the job."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    launched: bool  # whether a launcher has set the variables; else the process is alone


ALONE = RankInfo(0, 1, 0, 1, 0, launched=False)


# Variables that Open MPI, MPICH and its relatives, and PMIx set for each process that they start.
_MPI_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK")


def started_by_mpi(environ: Mapping[str, str]) -> bool:
    """Whether mpirun has started this process, without torch's own variables."""
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return False
    return any(environ.get(name) for name in _MPI_VARIABLES)


def parse_rank_info(environ: Mapping[str, str]) -> RankInfo:
    if not any(name in environ for name in ("RANK", "WORLD_SIZE")):
        return ALONE
    missing = [name for name in _NEEDED if not environ.get(name)]
    if missing:
        raise InitError(f"environment variables are missing: {', '.join(missing)}. {_CURE}")
    _number(environ, "MASTER_PORT", 1, 65536)
    world_size = _number(environ, "WORLD_SIZE", 1)
    rank = _number(environ, "RANK", 0, world_size)
    local_world = _number(environ, "LOCAL_WORLD_SIZE", 1, world_size + 1, default=str(world_size))
    local_rank = _number(environ, "LOCAL_RANK", 0, default=str(rank % local_world))
    node_rank = _number(environ, "GROUP_RANK", 0, default=str(rank // local_world))
    return RankInfo(rank, world_size, local_rank, local_world, node_rank, launched=True)


def _number(
    environ: Mapping[str, str], name: str, least: int, limit: int | None = None, default: str | None = None
) -> int:
    text = environ.get(name) or default or ""
    wanted = f"an integer of {least} or more" if limit is None else f"an integer from {least} to {limit - 1}"
    if not text.isascii() or not text.isdigit():
        raise InitError(f"invalid {name}={text!r} in the environment: not {wanted}. {_CURE}")
    value = int(text)
    if value < least or (limit is not None and value >= limit):
        world = "" if name == "WORLD_SIZE" else f" (WORLD_SIZE={environ['WORLD_SIZE']})"
        raise InitError(f"invalid {name}={text} in the environment: not {wanted}{world}. {_CURE}")
    return value


def device_index(info: RankInfo, n_devices: int, kind: str) -> int:
    """The index of this rank's device. If only one device is visible, it belongs to this rank."""
    if n_devices == 1:
        return 0
    if info.local_rank < n_devices:
        return info.local_rank
    raise InitError(
        f"no {kind} device for LOCAL_RANK={info.local_rank}: this process sees {n_devices} devices. Start at most "
        f"{n_devices} ranks per node (--nproc-per-node), or name the device: ddp.init(device=...)"
    )


def seconds(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise InitError(
            f"invalid {name}={text!r}: not a positive number of seconds. Use for example {name}=600"
        )
    return value


def known_backend(asked: str, known: Iterable[str]) -> str:
    """Check a backend: one name such as `gloo`, or one per kind of device as in torch, `cpu:gloo,cuda:nccl`."""
    names = [part.rpartition(":")[2] for part in asked.lower().split(",")]
    there = sorted(known)
    for name in names:
        if name not in there:
            raise InitError(f"unknown backend {name!r}. Use one that this torch has: {', '.join(there)}")
    return asked.lower()


# Which groups a surviving process forms again, and with which ranks (pure functions).
#
# A replacement runs the script from its top, so it forms the groups that the script forms in the new world. A survivor
# does not run the script. It knows only the groups that it had, so it derives their new ranks:
#
# - In a world of the same size every group keeps its ranks.
# - In a world of another size a group of all ranks becomes a group of all ranks. The ranks of any other group depend on
#   the script, so a survivor cannot know them.
#
# Processes announce each group before they form it. So a group that one of them does not form is an error, not a hang.


class CannotReform(CodedError, RuntimeError):
    """This process cannot form its groups again. A new process must replace it."""

    code = "DDP-7004"


@dataclass(frozen=True, slots=True)
class WorldPlace:
    """A rank of a world."""

    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class GroupMembers:
    """A group of this process: torch's name, and the ranks of its members in the order of their group ranks."""

    name: str
    ranks: tuple[int, ...]
    is_split: bool = False  # made from the default group's communicator, which needs all ranks of the job


def new_groups(
    groups: Sequence[GroupMembers], n_names: int, before: WorldPlace, now: WorldPlace
) -> list[GroupMembers]:
    """Return the groups with their ranks in the new world, in the same order. The first is the default group.

    `n_names`: how many groups the script has created, of which this process may be a member or not.
    """
    return [_new_group(group, groups, n_names, before, now) for group in groups]


def _new_group(
    group: GroupMembers, groups: Sequence[GroupMembers], n_names: int, before: WorldPlace, now: WorldPlace
) -> GroupMembers:
    everybody = len(group.ranks) == before.size
    own = set(range(n_names)) - {int(each.name) for each in groups if each.name.isdigit()}
    if everybody and before.size != now.size and not group.name.isdigit():
        raise CannotReform(
            f"the name of the group {group.name} depends on its ranks, and the world has {now.size} ranks instead of "
            f"{before.size}"
        )
    if before.size != now.size and (own or not everybody):
        part = f"the group {group.name} has the ranks {list(group.ranks)} of {before.size}"
        which = "there are groups of which this rank is not a member" if everybody else part
        raise CannotReform(
            f"{which}, and the world now has {now.size} ranks: only the script knows which ranks a part of the world "
            "has then"
        )
    if now.rank != before.rank and (own or (not everybody and now.rank not in group.ranks)):
        raise CannotReform(
            f"rank {before.rank} has become rank {now.rank}, which is not a member of the same groups"
        )
    if group.is_split and own:
        raise CannotReform(
            f"the group {group.name} was split from the default group, which needs ranks that are not its members"
        )
    return GroupMembers(group.name, tuple(range(now.size)) if everybody else group.ranks, group.is_split)


# --- announcements -------------------------------------------------------------------------------------

END = ""  # announced by a process that forms no more groups


@dataclass(frozen=True, slots=True)
class Announced:
    """What a process says before it forms a group."""

    name: str  # or END
    ranks: tuple[int, ...] = ()
    backend: str = ""


def objection(mine: Announced, rank: int, theirs: Announced) -> str:
    """Say why a group cannot be formed with this member, or "" if both form the same group."""
    if theirs == mine:
        return ""
    if theirs.name == END:
        return (
            f"rank {rank} has not formed the group {mine.name} of the ranks {list(mine.ranks)}. Create groups before "
            "state.run and state.resume, the same on all ranks, or inside the function that state.run calls"
        )
    return (
        f"rank {rank} forms the group {theirs.name} of the ranks {list(theirs.ranks)} ({theirs.backend}), this process "
        f"{mine.name} of {list(mine.ranks)} ({mine.backend}). Create the same groups in the same order on all ranks"
    )
