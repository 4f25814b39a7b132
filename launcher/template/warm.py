"""Enters and leaves the interpreter's start-up in the warm zygote."""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import socket
import sys
from collections.abc import Callable, Iterable
from typing import Any

from . import forking, freshness, import_variables, script_start

CONFIG_VARIABLE = "_DDP_LAUNCH_ZYGOTE"


def enter(hook_folder: str, before_ours: frozenset[str]) -> bool:
    """Serve as the zygote. In each rank, return whether the user has their own sitecustomize."""
    config = json.loads(os.environ.pop(CONFIG_VARIABLE))
    reads = import_variables.Reads()
    pool = config.get("pool")  # this process is a template of the warm pool
    forking.close_inherited(*((pool["listener"], *pool["output"]) if pool else (config["fd"],)))
    script_start.hide_hook(hook_folder, config["pythonpath"])
    atexit.register(_drop_imported_modules)  # registered first, so it runs last
    early = frozenset(sys.modules)
    users_own_exists = script_start.import_users_sitecustomize()
    settled = before_ours | (frozenset(sys.modules) - early) | {"sitecustomize", "_ddp_launch"}
    before_torch = frozenset(sys.modules)
    if not pool:
        _die_with_agent(config["agent"])
    put_marks = _load_marks()
    obstacle = freshness.starts_code_of_the_user() or _without_gc(_import_torch)
    _imported.extend(sys.modules.keys() - before_torch - {"__mp_main__"})  # __mp_main__ is the script
    preloaded = config["preload"]
    obstacle = obstacle or _preload(preloaded) or _shadowed(config["path0"], settled)
    read = reads.end()
    if pool:
        config = _await_command(pool, obstacle, read, lambda: _shadowed(config["path0"], settled))

    from _ddp_launch import loop

    control = socket.socket(fileno=config["fd"])
    rank = loop.Loop(control, warm_obstacle=obstacle, learns=config["learns"])
    rank.serve(config["cgroup"], config["scratch"])
    put_marks()
    forking.arrange()
    if rank.notes is not None:
        rank.notes.begin()
    if rank.late is not None:
        rank.late.begin(read, preloaded)
    script_start.leave(hook_folder)
    return users_own_exists


def _await_command(
    pool: dict[str, Any], obstacle: str, read: Iterable[str], shadowed: Callable[[], str]
) -> dict[str, Any]:
    """Be a template of the warm pool. Return in the zygote of a command, with its configuration."""
    from _ddp_launch import loop, pooled  # noqa: F401  # before the fork: each zygote needs the loop

    handed, printed = pooled.serve(pool, obstacle, read, shadowed)
    pooled.take_over(handed, pool["args"], printed)
    config: dict[str, Any] = handed.request["config"]
    return config | {"fd": handed.fds[0]}


def _die_with_agent(agent: int) -> None:
    """Let the kernel kill this process if the agent ends before the loop watches the socket."""
    from _ddp_launch import tree

    tree.die_with_parent(agent)


def _load_marks() -> Callable[[], None]:
    from _ddp_launch import script_start

    load: Callable[[], Callable[[], None]] = script_start.load
    return load()


def _without_gc(do_import: Callable[[], str]) -> str:
    """Import without garbage collections, which take 10 % of the import time and free nothing.

    Also disable torch's finalizers at exit, which free its operators one by one, without any effect.
    """
    import gc
    import weakref

    collected = gc.isenabled()
    finalizers = weakref.finalize._registry  # type: ignore[attr-defined]
    before = set(finalizers)
    gc.disable()
    try:
        return do_import()
    finally:
        for finalizer in finalizers.keys() - before:
            finalizer.atexit = False
        if not before:  # the first one of the script registers it again
            atexit.unregister(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
            weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
        if collected:
            gc.enable()


def _import_torch() -> str:
    try:
        import torch
    except Exception as error:  # a missing library, a broken installation: the error says which
        return f"cannot import torch in the Python of the ranks ({type(error).__name__}: {error})"
    return import_variables.too_old(str(getattr(torch, "__version__", "")))


def _preload(names: list[str]) -> str:
    """Import what the user wants in every rank. Threads do not survive a fork, and ranks cannot share a GPU in use."""
    import threading

    for name in names:
        try:
            __import__(name)
        except (Exception, SystemExit) as error:
            return f"{name} (--preload) cannot be imported ({type(error).__name__}: {error})"
        if threading.active_count() > 1:
            return f"{name} (--preload) starts a thread, which forked ranks would not have; remove it from --preload"
        if _device_in_use(sys.modules["torch"]):
            return (
                f"{name} (--preload) uses a GPU, which forked ranks could not use; remove it from --preload"
            )
    return ""


def _device_in_use(torch: Any) -> bool:
    device = torch.accelerator.current_accelerator()  # without a check: that could start the driver
    started = device and getattr(torch.get_device_module(device), "is_initialized", None)
    return bool(started and started())


def _shadowed(path0: str, settled: frozenset[str]) -> str:
    """Return why the script's folder prevents a warm start: `python script.py` searches it first, for torch too.

    `settled` are the modules that the interpreter always imports before it reaches the script.
    """
    if sys.flags.safe_path:
        return ""
    try:
        entries = os.listdir(path0)
    except OSError:
        return ""
    never = settled.union(sys.builtin_module_names)  # found before any folder is searched
    for entry in sorted(entries):
        module = _importable_name(path0, entry)
        if module in sys.modules and module not in never and not _comes_from(path0, sys.modules[module]):
            return f"{os.path.join(path0, entry)} has the same name as a module that torch imports; rename it"
    return ""


def _importable_name(folder: str, entry: str) -> str:
    stem, dot, ending = entry.partition(".")
    if dot:
        return stem if ending == "py" or ending.endswith("so") else ""
    return stem if os.path.exists(os.path.join(folder, entry, "__init__.py")) else ""


def _comes_from(folder: str, module: Any) -> bool:
    return (getattr(module, "__file__", None) or "").startswith(os.path.join(folder, ""))


_imported: list[str] = []


def _drop_imported_modules() -> None:
    """Skip the destruction of torch's modules (about 1,000) at exit, which takes about 0.17 s in every rank.

    They leave sys.modules before the interpreter clears it, and an extra reference keeps them alive until the end.
    Garbage is collected first: its finalizers may still import from torch.
    """
    if gc.isenabled():
        gc.collect()
    if script_start.meets_in_a_file():  # if the file stayed, the next job with it would find these ranks
        gc.unfreeze()  # classes of torch refer to the groups
        return
    kept = [sys.modules.pop(name) for name in _imported if name in sys.modules]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
