"""The process groups that torch.distributed has registered: read, removed, and registered again.

torch keeps tables from group objects to names, ranks, stores and backends. A group whose members are replaced stays in
these tables, with its new store and ranks. A group that cannot be changed is created again under the same name.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore
from torch.distributed.distributed_c10d import BackendConfig

from ddp.groups import successors
from ddp.groups.membership import Membership
from ddp.telemetry import guard, torch_api, torch_names

_DEFAULT = "default_pg"  # torch's prefix for the keys of the default group


@dataclass(frozen=True, slots=True)
class Registered:
    """A group of this process, as torch has registered it."""

    group: Any
    name: str
    ranks: tuple[int, ...]
    backend: str
    config: str  # device types and their backends
    tag: str
    description: str
    device: torch.device | None  # to which it is bound
    timeout: timedelta | None
    is_default: bool


def read() -> list[Registered]:
    """Return all groups in the order in which they were created; the default group is the first."""
    world = torch_api.world()
    return [
        Registered(
            group,
            str(world.pg_names[group]),
            _in_order(world.pg_group_ranks[group]),
            str(backend),
            str(world.pg_backend_config[group]),
            str(world.pg_to_tag.get(group, "")),
            str(group.group_desc),
            group.bound_device_id,
            timeout_of(group),
            group is world.default_pg,
        )
        for group, (backend, _store) in list(world.pg_map.items())
        if not successors.has(group)
    ]


def n_created() -> int:
    """How many groups have been created, counted by torch for their names."""
    return int(torch_api.world().group_count)


def set_created(number: int) -> None:
    torch_api.world().group_count = number


def _in_order(ranks: dict[int, int]) -> tuple[int, ...]:
    return tuple(sorted(ranks, key=ranks.__getitem__))


def timeout_of(group: Any) -> timedelta | None:
    """Return how long a collective of this group may take; None if that is unknown."""
    if isinstance(group, Membership):
        return group.timeout
    for device in torch_api.device_types(group):
        with suppress(RuntimeError, AttributeError):
            found: timedelta = torch_api.backend_of(group, device).options._timeout
            return found
    return None


def forget(known: Registered) -> None:
    """Remove a group from torch's tables."""
    world, group = torch_api.world(), known.group
    for table in _tables(world):
        table.pop(group, None)
    for members in world.tags_to_pg.values():
        while any(group is each for each in members):
            members.pop(next(i for i, each in enumerate(members) if each is group))
    with suppress(RuntimeError, KeyError, ValueError):
        torch_api.get(torch_names.UNREGISTER_GROUP)(known.name)
    if known.is_default:
        torch_api.get(torch_names.SET_DEFAULT_GROUP)(None)


def _tables(world: Any) -> tuple[dict[Any, Any], ...]:
    return (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
        world.pg_coalesce_state,
    )


def let_stand_for(old: Any, new: Any) -> None:
    """Enter an old group in the tables like its successor, so that torch's functions accept it."""
    for table in _tables(torch_api.world()):
        if new in table:
            table[old] = table[new]


def forget_stand_in(old: Any) -> None:
    for table in _tables(torch_api.world()):
        table.pop(old, None)


def with_backend(known: Registered, backend: str) -> Registered:
    """The same group, to be formed with the other one of our backends `shm` and `hier`."""
    known.group.use(backend)
    return replace(known, backend=backend, config=str(BackendConfig(dist.Backend(backend))))


# --- forming ---------------------------------------------------------------------------------------------


def form(
    known: Registered, ranks: tuple[int, ...], rank: int, store: Any, interrupted: Callable[[], str]
) -> Any:
    """Form a group that was forgotten, with these ranks of the job. Return it, or its successor."""
    if isinstance(known.group, Membership):
        prefixed = PrefixStore(f"{known.name}/", store)
        here = PrefixStore("cpu/", prefixed)  # as torch does for the backend of CPU tensors
        global_ranks = [] if known.is_default else list(ranks)
        known.group.form_again(here, ranks.index(rank), len(ranks), global_ranks, interrupted)
        _register(known, prefixed)
        made = known.group
    else:
        made = _create(known, ranks, rank, store)
    world = torch_api.world()
    if known.is_default:
        torch_api.get(torch_names.SET_DEFAULT_GROUP)(made)
    world.pg_group_ranks[made] = {member: i for i, member in enumerate(ranks)}
    _barrier(known, len(ranks), rank, store)
    return made


def _register(known: Registered, store: Any) -> None:
    world, group = torch_api.world(), known.group
    world.pg_map[group] = (dist.Backend(known.backend), store)
    world.pg_names[group] = known.name
    world.pg_backend_config[group] = known.config
    world.pg_to_tag[group] = known.tag
    for tag in {known.tag, ""} if not known.tag.startswith("user:") else {known.tag}:
        world.tags_to_pg.setdefault(tag, []).append(group)
    torch_api.get(torch_names.REGISTER_GROUP)(known.name, group)


def _create(known: Registered, ranks: tuple[int, ...], rank: int, store: Any) -> Any:
    make = torch_api.get(torch_names.NEW_GROUP)
    with guard.creating_group():
        made, _store = make(
            len(ranks),
            ranks.index(rank),
            [] if known.is_default else list(ranks),
            dist.Backend(known.backend),
            store,
            known.name,
            timeout=known.timeout or dist.default_pg_timeout,
            pg_tag=known.tag.removeprefix("user:") if known.tag.startswith("user:") else None,
            device_id=known.device,
            group_desc=known.description,
        )
    return made


def _barrier(known: Registered, size: int, rank: int, store: Any) -> None:
    """Do what torch does after it has created a group, if the user asked for it."""
    if os.environ.get("TORCH_DIST_INIT_BARRIER", "0") == "1":
        timeout = known.timeout or dist.default_pg_timeout
        n_ranks = dist.get_world_size() if known.name.isdigit() else size
        torch_api.get(torch_names.STORE_BARRIER)(rank, store, known.name, n_ranks, timeout)


def default_store(store: Any) -> Any:
    """The store of the default group, for the store of a generation."""
    return PrefixStore(_DEFAULT, store)


def store_of_default() -> Any:
    """The store that torch gives to groups that are created after the default group."""
    return torch_api.default_store()


def is_from_environment() -> bool:
    """Whether the default group was created with the variables of the launcher: only these say where to meet again."""
    return bool(torch_api.get(torch_names.INIT_METHOD) == "env://")
