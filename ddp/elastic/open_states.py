"""The States that are open in this process, and what becomes of their memory when they are left."""

from __future__ import annotations

import os
import re
import weakref
from typing import TYPE_CHECKING

import torch.distributed as dist

from ddp.elastic import request, scratch
from ddp.telemetry.coded import WrongType, WrongUse, WrongValue

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import ProcessGroup

    from ddp.elastic.keeper import Keeper
    from ddp.elastic.state import State

_open: weakref.WeakSet[State] = weakref.WeakSet()
_scopes: weakref.WeakKeyDictionary[State, str] = weakref.WeakKeyDictionary()
_answered: weakref.WeakSet[State] = weakref.WeakSet()


def check_options(every: int, disk_every: int, folder: str | os.PathLike[str] | None, keep: int) -> None:
    for option, value, least in (("every", every, 0), ("disk_every", disk_every, 0), ("keep", keep, 1)):
        if isinstance(value, bool) or not hasattr(type(value), "__index__"):
            raise WrongType(
                f"invalid {option}={value!r}: it is a number of commits. Use an int of {least} or more"
            )
        if value < least:
            raise WrongValue(
                f"invalid {option}={value}. Use {least} or more{'' if least else ', where 0 means never'}"
            )
    if disk_every and folder is None:
        raise WrongValue("disk_every has no effect without a folder. Use State(folder=..., disk_every=...)")
    if folder is not None:
        _check_folder(folder)


def _check_folder(folder: object) -> None:
    if not isinstance(folder, (str, os.PathLike)):
        raise WrongType(f"invalid folder={folder!r}: use a path, or a URL such as s3://bucket/run")
    path = os.fspath(folder)
    if not path:
        raise WrongValue("invalid folder='': it is empty. Use the path of a folder for commits, or a URL")
    if os.path.exists(path) and not os.path.isdir(path):
        raise WrongValue(
            f"invalid folder={path!r}: it is a file. Use the path of a folder, which is made if needed"
        )


def check_names(named: Mapping[str, object], kind: type[State]) -> None:
    for name in named:
        if hasattr(kind, name) or name.startswith("_"):
            raise WrongValue(
                f"invalid name {name!r} in State(): reserved. Use a name that does not start with _ and is not a method"
            )


def check_scope(scope: str, group: ProcessGroup | None) -> None:
    if scope and not re.fullmatch(r"[a-z0-9_]{1,40}", scope):
        raise WrongValue(
            f"invalid scope={scope!r}: it is part of file names. Use up to 40 small letters, digits and underscores"
        )
    if group is not None and dist.get_rank(group) < 0:
        raise WrongValue(
            f"rank {dist.get_rank()} is not in the group of State(group=...). Create this State only on the ranks of "
            "the group"
        )
    if group is not None and not scope and group.size() < dist.get_world_size():
        raise WrongValue(
            "State(group=...) over a part of the ranks needs a scope: a State over other ranks would overwrite its "
            'commits. Give the States of each group a name of their own, for example scope="stage0"'
        )


def enter(state: State, scope: str) -> None:
    """Raise if this process has another open State of this scope: they would overwrite each other's commits."""
    for other in list(_open):
        if other is not state and other.is_open and _scopes[other] == scope:
            raise WrongUse(
                f"this process already has a State with scope={scope!r}. Put all objects into one State, close() the "
                "other one first, or give each State a scope of its own"
            )
    _open.add(state)
    _scopes[state] = scope


def obstacle(state: State) -> str:
    """Say why this process cannot go on after a failure: `state.run` resumes only its own State."""
    scopes = sorted(_scopes[other] for other in list(_open) if other is not state and other.is_open)
    if not scopes:
        return ""
    return (
        f"the script resumes another State (scope={scopes[0]!r}) before state.run, which resumes only its own. Resume "
        "it in the function that state.run calls"
    )


def has_answered(state: State) -> bool:
    """Note that this State has written a checkpoint; return whether all States of this process have, as requested."""
    if not request.checkpoint_requested():
        return True
    _answered.add(state)
    if any(each.is_open and each.has_folder and each not in _answered for each in list(_open)):
        return False
    _answered.clear()
    return True


def leave(keeper: Keeper, pid: int) -> None:
    """Keep memory for the next generation if a launcher can start one, else remove it. Forked children do nothing."""
    if os.getpid() != pid:
        return
    try:
        keeper.leave()
    finally:
        if not scratch.is_launched(os.environ):
            keeper.remove()
