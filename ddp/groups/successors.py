"""Groups that were replaced pass every call on to their successors.

The members of a group of torch's own class cannot be changed. So a new group takes its place, and everything in Python
that still holds the old one (a variable of the script, an optimizer, a device mesh) goes on through it:

- The methods and properties of ProcessGroup ask for the successor of their object first. They are wrapped when the
  first group is replaced; before that, nothing costs anything.
- The old group is entered in torch's tables like its successor (`ddp.groups.registry`).

C++ code does not see this. torch finds groups for compiled code by name, and the successor has the same name. The
reducer of torch's DDP is created again (`ddp.groups.wrappers`).

For a class in Python, torch takes an inherited wrapper for an override. See `ddp/telemetry/collective_marks.py`, which
solves this in the same way: a wrapper has the name of the method that it wraps, and calls the method itself.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ddp.telemetry import status_page
from ddp.telemetry.collective_marks import copy_name

# By the identity of the old group: torch's class may define equality. Code that still uses the old group keeps it.
_next: dict[int, tuple[weakref.ref[Any], Any]] = {}
_is_installed: list[bool] = []


def has(group: Any) -> bool:
    found = _next.get(id(group))
    return found is not None and found[0]() is group


def of(group: Any) -> Any:
    """The group that stands for this one now: itself, if it was never replaced."""
    found = _next.get(id(group))
    return found[1] if found is not None and found[0]() is group else group


def set_successor(old: Any, new: Any) -> None:
    """Let `new` stand for `old`, and for all groups that `old` stands for."""
    if not _is_installed:
        _is_installed.append(True)
        status_page.keep("replaced groups", _next)  # the guard does not need to know them
        _install()
    key = id(old)
    for number, (reference, current) in list(_next.items()):
        if current is old:
            _next[number] = (reference, new)
    _next[key] = (weakref.ref(old, lambda _reference: _next.pop(key, None)), new)


def predecessors(new: Any) -> list[Any]:
    """The groups for which this one stands, and which are still in use."""
    return [old for reference, current in list(_next.values()) if current is new and (old := reference())]


def _install() -> None:
    group_class: Any = dist.ProcessGroup
    for name, attribute in list(vars(group_class).items()):
        if name.startswith("__") or name.startswith("_pybind11"):
            continue
        if isinstance(attribute, property):
            setattr(group_class, name, _following_property(attribute))
        elif _is_method(attribute):
            setattr(group_class, name, _following(attribute, name))


def _is_method(attribute: Any) -> bool:
    """Whether it is a method of an object: pybind11's, or a wrapper of one."""
    return inspect.isfunction(attribute) or type(attribute).__name__ == "instancemethod"


def _following(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    def wrapper(group: Any, *args: Any, **kwargs: Any) -> Any:
        return original(of(group), *args, **kwargs)

    return copy_name(wrapper, original, name)


def _following_property(original: property) -> property:
    get, put = original.fget, original.fset

    @functools.wraps(get)  # type: ignore[arg-type]
    def read(group: Any) -> Any:
        return get(of(group))  # type: ignore[misc]

    def write(group: Any, value: Any) -> None:
        put(of(group), value)  # type: ignore[misc]

    return property(read, write if put is not None else None)
