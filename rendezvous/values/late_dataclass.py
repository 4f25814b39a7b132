"""`dataclass` for the launcher and the service: the methods of a class are made when they are needed.

Theory of operation
-------------------
The decorator of the standard library compiles about six methods per class, which takes half a millisecond. A launcher
defines more than 200 such classes and uses a fraction of them, and this was half of the time of its start.

This decorator makes the class with its slots, and keeps the one that it was given.

- One function for all classes makes the first instances. It is slower than a compiled `__init__`.
- At the first call of any other method, when a caller asks for the fields, and after a few instances, it lets the
  standard library complete a copy of the given class, and copies what that has added.

The standard library also makes the class with slots a second time, so the result is the same. What is wrong with a
call comes from the complete class. Only frozen classes with slots are late; all others are complete at once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import MISSING
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, /, *, frozen=False, slots=False, **more):
        if cls is not None or more or not (frozen and slots):
            return dataclasses.dataclass(cls, frozen=frozen, slots=slots, **more)
        return _late


_FEW = 8  # instances; a class with more of them is worth a compiled `__init__`
_METHODS = ("__eq__", "__hash__", "__repr__", "__setattr__", "__delattr__", "__getstate__", "__setstate__")
_OF_THE_OBJECT = ("__dict__", "__weakref__")
_UNUSUAL = ("ClassVar", "InitVar", "KW_ONLY")


class _Field(NamedTuple):
    name: str
    default: Any
    factory: Any


class _Attribute:
    """An attribute of the class that is made at the first use."""

    __slots__ = ("_make",)

    def __init__(self, make: Any) -> None:
        self._make = make

    def __get__(self, _instance: object, _owner: type | None = None) -> Any:
        return self._make()


def _late(given: type) -> type:
    names = [name for name, kind in given.__annotations__.items() if not _is(kind, "ClassVar")]
    namespace = {name: value for name, value in vars(given).items() if name not in (*names, *_OF_THE_OBJECT)}
    inherited = {name for base in given.__mro__[1:-1] for name in base.__dict__.get("__slots__", ())}
    namespace["__slots__"] = tuple(name for name in names if name not in inherited)
    namespace["__qualname__"] = given.__qualname__
    # Without a text the standard library would write the signature here, for which it imports `inspect`.
    namespace["__doc__"] = given.__doc__ = given.__doc__ or given.__name__
    made: type = type(given)(given.__name__, given.__bases__, namespace)
    instances = 0

    @cache
    def usual_fields() -> list[_Field] | None:
        return _fields(given, made)

    def complete() -> dict[str, Any]:
        if vars(made)["__init__"] is __init__:
            _complete(given, made, frozenset(names))
        return vars(made)  # type: ignore[return-value]

    def __init__(self: Any, *args: Any, **named: Any) -> None:
        nonlocal instances
        instances += 1
        fields = usual_fields() if instances <= _FEW else None
        if fields is None or not _fill(self, fields, args, dict(named)):
            complete()["__init__"](self, *args, **named)
        elif hasattr(made, "__post_init__"):
            self.__post_init__()

    def match_args() -> tuple[str, ...]:
        fields = usual_fields()
        return complete()["__match_args__"] if fields is None else tuple(each.name for each in fields)

    made.__init__ = __init__  # type: ignore[misc]
    for name in _METHODS:
        if vars(given).get(name) is None:
            setattr(made, name, _method(name, complete))
    made.__match_args__ = _Attribute(match_args)  # type: ignore[attr-defined,misc]
    made.__dataclass_fields__ = _Attribute(lambda: complete()["__dataclass_fields__"])  # type: ignore[attr-defined]
    made._late_given = given  # type: ignore[attr-defined]
    return made


def _method(name: str, complete: Any) -> Any:
    def method(self: Any, *args: Any) -> Any:
        return complete()[name](self, *args)

    return method


def _fields(given: type, made: type) -> list[_Field] | None:
    """Return the fields in their order; None if `__init__` is not the usual one."""
    found: dict[str, _Field] = {}
    for base in reversed(made.__mro__[:-1]):
        source = given if base is made else vars(base).get("_late_given")
        if source is None or any(_is(kind, *_UNUSUAL) for kind in source.__annotations__.values()):
            return None
        for name in source.__annotations__:
            value = vars(source).get(name, MISSING)
            if not isinstance(value, dataclasses.Field):
                found[name] = _Field(name, value, MISSING)
            elif value.init and value.kw_only is not True:
                found[name] = _Field(name, value.default, value.default_factory)
            else:
                return None
    return list(found.values())


def _fill(self: Any, fields: list[_Field], args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Set the attributes of a new instance. Return False if the arguments do not fit."""
    if len(args) > len(fields):
        return False
    for field, value in zip(fields, args, strict=False):
        object.__setattr__(self, field.name, value)
    for field in fields[len(args) :]:
        value = named.pop(field.name, field.default)
        if value is MISSING and field.factory is not MISSING:
            value = field.factory()
        if value is MISSING:
            return False
        object.__setattr__(self, field.name, value)
    return not named


def _is(kind: Any, *names: str) -> bool:
    """Whether an annotation is one of these, as `typing.ClassVar[int]` is a ClassVar."""
    return isinstance(kind, str) and kind.partition("[")[0].rpartition(".")[2] in names


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
    # The class can be used by others meanwhile. Until `__init__` is there, they do the same for themselves.
    last = {name: added.pop(name) for name in ("__dataclass_params__", "__init__")}
    for name, value in (*added.items(), *last.items()):
        setattr(made, name, value)
