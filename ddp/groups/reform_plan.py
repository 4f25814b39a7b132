"""Which groups a surviving process forms again, and with which ranks (pure functions).

A replacement runs the script from its top, so it forms the groups that the script forms in the new world. A survivor
does not run the script. It knows only the groups that it had, so it derives their new ranks:

- In a world of the same size every group keeps its ranks.
- In a world of another size a group of all ranks becomes a group of all ranks. The ranks of any other group depend on
  the script, so a survivor cannot know them.

Processes announce each group before they form it. So a group that one of them does not form is an error, not a hang.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp.telemetry.coded import CodedError

if TYPE_CHECKING:
    from collections.abc import Sequence


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
