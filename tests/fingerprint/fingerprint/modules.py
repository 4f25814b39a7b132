"""The values of all modules, by their names: what an import has kept of its surroundings."""

import collections
import enum
import hashlib
import logging
import os
import re
import sys
import types

from fingerprint.python import name_of

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), range, slice)
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodDescriptorType)
_DEPTH = 4
_LONG = 300
_ADDRESSES = range(
    1 << 43, 1 << 48
)  # of code and objects; no module of the libraries has such a number otherwise


def look():
    found = {}
    for name, module in list(sys.modules.items()):
        values = getattr(module, "__dict__", None)
        if (
            type(values) is dict
            and name not in ("sys", "__main__")
            and name.partition(".")[0] != "fingerprint"
        ):
            found[name] = {key: text(value) for key, value in list(values.items()) if key != "__builtins__"}
    main = vars(sys.modules["__main__"])
    found["__main__"] = {key: text(value) for key, value in main.items() if not key.startswith("__")}
    return found


def text(value):
    found = _text(value, _DEPTH)
    return (
        found
        if len(found) <= _LONG
        else f"{found[:80]}... {hashlib.sha256(found.encode(errors='replace')).hexdigest()[:12]}"
    )


def _text(value, depth):
    kind = type(value)
    if kind is int and value in _ADDRESSES:
        return "an address"
    if kind in _PLAIN:
        return repr(value)
    if kind in (set, frozenset):
        return (
            f"{kind.__name__} {sorted(_text(each, depth - 1) for each in list(value))}"
            if depth
            else kind.__name__
        )
    if kind in (list, tuple, collections.deque):
        return (
            f"{kind.__name__} {[_text(each, depth - 1) for each in list(value)]}" if depth else kind.__name__
        )
    if kind in (dict, collections.OrderedDict, collections.defaultdict, types.MappingProxyType):
        items = (
            [(_text(key, depth - 1), _text(each, depth - 1)) for key, each in list(value.items())]
            if depth
            else ()
        )
        return f"{kind.__name__} {sorted(items)}"
    return _text_of_object(value, kind)


def _text_of_object(value, kind):
    if kind is types.ModuleType or issubclass(kind, types.ModuleType):
        return f"module {vars(value).get('__name__')}"
    if issubclass(kind, _NAMED):
        return name_of(value)
    if issubclass(kind, enum.Enum):
        return str(value)
    if kind is re.Pattern:
        return f"pattern {value.pattern!r}"
    if issubclass(kind, logging.Logger):
        return f"logger {value.name} {value.level}"
    if issubclass(kind, os.PathLike) and kind.__module__.startswith("pathlib"):
        return f"path {value}"
    if kind.__module__ == "torch" and kind.__name__ in ("dtype", "device", "Size", "layout"):
        return repr(value)
    return f"a {kind.__module__}.{kind.__qualname__}"
