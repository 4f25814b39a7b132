"""`dataclass` for the launcher and the service: the methods of a class are made when they are first used.

Theory of operation
-------------------
The decorator of the standard library compiles about six methods per class, which takes half a millisecond. A launcher
defines more than 200 such classes and uses a fraction of them, and this was half of the time of its start.

This decorator makes the class with its slots, and keeps the one that it was given. When the class gets its first
instance, or somebody asks for its fields, it lets the standard library complete a copy of the class it was given, and
copies what that has added. The standard library does the same in the other order, so the result is the same.

Only frozen classes with slots are late. All others go to the standard library at once.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, /, *, frozen=False, slots=False, **more):
        if cls is not None or more or not (frozen and slots):
            return dataclasses.dataclass(cls, frozen=frozen, slots=slots, **more)
        return _late


_LATE = ("__dataclass_fields__", "__match_args__", "__setstate__")  # besides __init__
_OF_THE_OBJECT = ("__dict__", "__weakref__")


class _Late:
    """An attribute of the class that is there once the class is complete."""

    __slots__ = ("_complete", "_name")

    def __init__(self, name: str, complete: Any) -> None:
        self._name, self._complete = name, complete

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        value = vars(self._complete())[self._name]
        return value if instance is None or not callable(value) else value.__get__(instance, owner)


def _late(given: type) -> type:
    names = [name for name, kind in given.__annotations__.items() if not _is_of_class(kind)]
    namespace = {name: value for name, value in vars(given).items() if name not in (*names, *_OF_THE_OBJECT)}
    inherited = {name for base in given.__mro__[1:-1] for name in base.__dict__.get("__slots__", ())}
    namespace["__slots__"] = tuple(name for name in names if name not in inherited)
    namespace["__qualname__"] = given.__qualname__
    # Without a text the standard library would write the signature here, for which it imports `inspect`.
    namespace["__doc__"] = given.__doc__ = given.__doc__ or given.__name__
    made: type = type(given)(given.__name__, given.__bases__, namespace)

    def complete() -> type:
        if vars(made)["__init__"] is __init__:
            _complete(given, made, frozenset(names))
        return made

    def __init__(self: Any, *args: Any, **named: Any) -> None:
        vars(complete())["__init__"](self, *args, **named)

    made.__init__ = __init__  # type: ignore[misc]
    for name in _LATE:
        setattr(made, name, _Late(name, complete))
    return made


def _is_of_class(kind: Any) -> bool:
    return isinstance(kind, str) and kind.removeprefix("typing.").startswith("ClassVar")


def _complete(given: type, made: type, fields: frozenset[str]) -> None:
    """Several threads may do this at the same time: each completes a class of its own, and all copy the same."""
    before = {name: value for name, value in vars(given).items() if name not in _OF_THE_OBJECT}
    own = type(given)(given.__name__, given.__bases__, dict(before))
    whole: type = dataclasses.dataclass(frozen=True, slots=True)(own)
    added = {
        name: value
        for name, value in vars(whole).items()
        if name not in (*fields, *_OF_THE_OBJECT) and (name not in before or before[name] is not value)
    }
    # The class can be used by others meanwhile. They wait for `__init__`, and do the same for themselves.
    last = {name: added.pop(name) for name in ("__dataclass_params__", "__init__")}
    for name, value in (*added.items(), *last.items()):
        setattr(made, name, value)
