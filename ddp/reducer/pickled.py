"""The process group of a wrapper that was pickled or copied.

A process group cannot be pickled. torch's class refuses wrappers on a group of their own; one on the default group
comes back on the default group. Ours notes which ranks its group had. It comes back on a group of this process with the
same ranks, preferably the one with the same name: a copy then has the group of the original. A group of all ranks may
also be the default group, as when another job reads the pickle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from ddp.groups import registry
from ddp.telemetry.coded import WrongUse

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

KEY = "_pickled_group"


@dataclass(frozen=True)
class Origin:
    """The group of a wrapper when it was pickled."""

    name: str
    ranks: tuple[int, ...]
    backend: str
    of_all_ranks: bool


def origin(group: ProcessGroup) -> Origin | None:
    """Describe a group; None for the default group."""
    if group is dist.group.WORLD:
        return None
    ranks = tuple(dist.get_process_group_ranks(group))
    of_all = len(ranks) == dist.get_world_size()
    return Origin(str(group.group_name), ranks, dist.get_backend(group), of_all)


def group_for(found: Origin | None) -> ProcessGroup | None:
    """Return the group of a wrapper that is read. None: the default group."""
    if found is None:
        return None
    same = [each for each in registry.read() if each.ranks == found.ranks]
    same.sort(key=lambda each: (each.name != found.name, each.backend != found.backend, each.is_default))
    if same:
        group: ProcessGroup = same[0].group
        return group
    if found.of_all_ranks:
        return None
    raise WrongUse(
        f"cannot read a pickled DistributedDataParallel: it was wrapped for the ranks {list(found.ranks)}, and no "
        "process group here has these ranks. Create it with torch.distributed.new_group before you read the pickle, or "
        "save the state_dict() instead"
    )
