"""The way to torch's private names, which `torch_names` lists, and the check that they are still what we expect.

At the start of a rank, `warn_once` looks at every name whose module is loaded: whether it exists, and whether functions
that we replace take the parameters that our replacement takes. One warning of rank 0 lists what will not work.

Nothing here imports torch at load time: the launcher loads this file by path, before a script imports torch.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from . import status_page, torch_names

if TYPE_CHECKING:
    import torch

    from .torch_names import Name

_log = logging.getLogger("ddp")
_RECORDED = "2000"


# --- looking names up --------------------------------------------------------------------------------


def get(name: Name) -> Any:
    """Return what torch has under this name; import its module if necessary. Raise AttributeError if it is missing."""
    owner = resolve_name(name.owner)
    if not hasattr(owner, name.name):
        raise AttributeError(f"torch {_version_text()} has no {name.path}, which {name.loses} needs")
    return getattr(owner, name.name)


def has(name: Name) -> bool:
    """Whether this release of torch has the name."""
    return hasattr(resolve_name(name.owner), name.name)


def patch(name: Name, wrap: Callable[[Any], Any]) -> None:
    """Replace what torch has under this name by `wrap(original)`."""
    owner = resolve_name(name.owner)
    is_static = isinstance(vars(owner).get(name.name), staticmethod)
    wrapped = wrap(get(name))
    setattr(owner, name.name, staticmethod(wrapped) if is_static else wrapped)


# --- the check ---------------------------------------------------------------------------------------


def version() -> torch_names.Version:
    found = re.match(r"(\d+)\.(\d+)", _version_text())
    return (int(found[1]), int(found[2])) if found else torch_names.OLDEST


def _version_text() -> str:
    return str(getattr(sys.modules.get("torch"), "__version__", ""))


def problems(names: Iterable[Name] = torch_names.NAMES) -> dict[str, list[str]]:
    """Return what does not work with the installed torch, and for each the names that are missing or different."""
    found: dict[str, list[str]] = {}
    for name in names:
        problem = _problem(name)
        if problem and name.loses:
            found.setdefault(name.loses, []).append(problem)
    return found


def _problem(name: Name) -> str:
    module, _, of_class = name.owner.partition(":")
    owner: Any = sys.modules.get(module)
    if owner is None:
        return ""  # not loaded: the one that needs it gets an error that says the same
    if of_class:
        owner = getattr(owner, of_class, None)
    if owner is not None and name.set_in_init:
        return "" if name.name in owner.__init__.__code__.co_names else f"{name.path} is missing"
    if not hasattr(owner, name.name):
        return f"{name.path} is missing"
    if name.takes and name.takes != (taken := _parameters(getattr(owner, name.name)))[: len(name.takes)]:
        return f"{name.path} takes ({', '.join(taken)})"
    return ""


def _parameters(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def warn_once() -> None:
    """Log what does not work with this torch: once in a process, on rank 0."""
    if not status_page.once("torch_api") or os.environ.get("RANK", "0") != "0":
        return
    if found := problems():
        what = "; ".join(f"{lost} ({', '.join(causes)})" for lost, causes in found.items())
        _log.warning("ddp: these functions do not work with torch %s: %s", _version_text(), what)


# --- calls -------------------------------------------------------------------------------------------


def rpc_context_id() -> int:
    """Return the number of this thread's context of torch.distributed.autograd; RuntimeError if there is none."""
    return int(get(torch_names.RPC_CONTEXT)()._context_id())


def is_autograd_compiled() -> bool:
    """Whether torch compiles backward passes now, and their hooks along with them. True if this is unknown."""
    name = torch_names.COMPILED_AUTOGRAD
    module = sys.modules.get(name.owner)  # not imported for this: that takes seconds
    return module is not None and bool(getattr(module, name.name, True))


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    _copy_all()(targets, sources)


@functools.cache
def _copy_all() -> Any:
    return get(torch_names.FOREACH_COPY)


@functools.cache
def shard_of_dtensor() -> Any:
    """The function for the shape and the offset of a rank's shard. A resume calls it for each tensor."""
    return get(torch_names.SHARD_OF_DTENSOR)


@functools.cache
def skip_in_dynamo(package: str) -> None:
    """Make torch.compile skip a package, as it skips torch's DDP.

    Once in a process: each call makes torch compile a regular expression of hundreds of folders again.
    """
    get(torch_names.SKIPPED_BY_DYNAMO)(package)


def backend_of(group: Any, device: torch.device) -> Any:
    """Return the backend of a group for this device type; RuntimeError or AttributeError if it has none."""
    return group._get_backend(device)


def device_types(group: Any) -> list[torch.device]:
    found: list[torch.device] = group._device_types
    return found


def gloo_threads(backend: Any) -> int | None:
    threads: int | None = getattr(backend.options, "_threads", None)
    return threads


# --- the process groups of torch.distributed ---------------------------------------------------------


def groups() -> tuple[Any, ...]:
    """Return all process groups that torch has registered. Does not import torch.

    Groups that were replaced are not among them, although torch's tables have them: their successors are.
    """
    world = _world()
    replaced = status_page.kept("replaced groups") or ()
    # The list is made without giving another thread a turn, which may be creating a group.
    return (
        tuple(group for group in list(world.pg_map) if id(group) not in replaced) if world is not None else ()
    )


def has_default_group() -> bool:
    """torch registers a group shortly before it sets the default group, whose store is needed to find peers."""
    return getattr(_world(), "default_pg", None) is not None


def world() -> Any:
    """Return torch's tables of process groups."""
    return get(torch_names.WORLD)


def _world() -> Any:
    return getattr(sys.modules.get(torch_names.WORLD.owner), torch_names.WORLD.name, None)


def is_loaded() -> bool:
    """Whether the script can have process groups: it has imported torch, and torch was built with them."""
    return torch_names.WORLD.owner in sys.modules


def default_store() -> Any:
    return get(torch_names.DEFAULT_STORE)()


def meets_in_a_file() -> bool:
    """Whether the store of the default group is a file. The destructor of the store removes it after the last rank."""
    if not has_default_group():
        return False
    from torch.distributed import FileStore, PrefixStore

    store = default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, FileStore)


def switch_recorder_on() -> None:
    """Let the flight recorder keep as many collectives as newer releases do, unless the user has set a number."""
    if version() < torch_names.RECORDER_HAS_SIZE and not os.environ.keys() & torch_names.RECORDER_SIZE:
        os.environ[torch_names.RECORDER_SIZE[0]] = _RECORDED


def record_of_collectives(backends: Collection[str]) -> bytes:
    """Return the flight recorders of these backends as JSON: the last collectives and their states."""
    first, *others = [_record_of(name) for name in sorted(backends)]
    if not others:
        return first
    whole = json.loads(first)
    for each in map(json.loads, others):
        whole["entries"] = whole.get("entries", []) + each.get("entries", [])
        whole["pg_config"] = whole.get("pg_config", {}) | each.get("pg_config", {})
    return json.dumps(whole).encode()


def _record_of(backend: str) -> bytes:
    """NCCL has a recorder of its own. From 2.15 on, each other backend has one too, and its name selects it."""
    bindings = sys.modules.get(torch_names.RECORD_OF_ALL.owner)
    of_all = getattr(bindings, torch_names.RECORD_OF_ALL.name, None)
    dump = (getattr(bindings, torch_names.RECORD_OF_NCCL.name, None) if backend == "nccl" else None) or of_all
    if dump is None:
        raise RuntimeError(f"torch {_version_text()} has no flight recorder for this process group")
    by_name = dump is of_all and version() >= torch_names.RECORDER_OF_EACH
    # With collectives, and not only those that are active.
    data = dump(True, False, backend) if by_name else dump(True, False)
    return data if isinstance(data, bytes) else data.encode()
