"""Values as plain JSON and back: every dataclass is a row of its fields' values, read and written by its annotations.

The schema names the columns of each class, in the order that the writer used. So a later version may add a field with a
default and still read what an older one wrote. The reader rejects everything that it cannot read exactly: an unknown
column, a missing column without a default, or a value of another type. Nothing that was read is ever executed.

A value of a union of classes is a pair: the name of its class, and its row.

The encoders and decoders are built once per class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from operator import attrgetter
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from rendezvous.values.frozen_map import FrozenMap

Schema = dict[str, tuple[str, ...]]
_UNIONS = (UnionType, Union)  # the second one, if a part is Annotated


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def kept_fields(cls: Any) -> list[Field[Any]]:
    """Without those that are not part of a snapshot."""
    return [f for f in fields(cls) if f.metadata.get("kept", True)]


def all_fields(cls: Any) -> list[Field[Any]]:
    return list(fields(cls))


def _is_class(kind: Any) -> bool:
    return isinstance(kind, type) and is_dataclass(kind)


def classes(root: Any, columns: Callable[[Any], list[Field[Any]]]) -> tuple[Any, ...]:
    """Every dataclass that a `root` may contain, starting with `root`."""
    found: dict[Any, None] = {}

    def visit(kind: Any) -> None:
        if not _is_class(kind):
            for part in get_args(kind):
                visit(part)
        elif kind not in found:
            found[kind] = None
            for f in columns(kind):
                visit(_hints(kind)[f.name])

    visit(root)
    return tuple(found)


def texts_of(cls: Any) -> set[str]:
    """The names of the fields with texts, or with several of them."""
    return {f.name for f in fields(cls) if _has_text(_hints(cls)[f.name])}


def _has_text(kind: Any) -> bool:
    return get_origin(kind) is Annotated or any(_has_text(part) for part in get_args(kind))


def _bare(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _without_none(parts: tuple[Any, ...]) -> list[Any]:
    return [part for part in parts if part is not NoneType]


# --- writing -----------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    return value


class RowEncoder:
    """`columns`: which fields are written. `words`: what is written in place of a text (see values/text_limits.py).

    `instead`: for a class, the function that returns the value to write in place of one of its values.
    """

    def __init__(
        self,
        columns: Callable[[Any], list[Field[Any]]],
        words: Callable[[str], str] | None = None,
        instead: Mapping[type, Callable[[Any], Any]] = MappingProxyType({}),
    ) -> None:
        self._columns, self._words, self._instead = columns, words, instead
        self._made: dict[Any, Callable[[Any], Any]] = {}

    def schema(self, root: Any) -> Schema:
        found = classes(root, self._columns)
        return {cls.__name__: tuple(f.name for f in self._columns(cls)) for cls in found}

    def encoder(self, kind: Any) -> Callable[[Any], Any]:
        if kind not in self._made:
            self._made[kind] = self._make(kind)
        return self._made[kind]

    def _make(self, kind: Any) -> Callable[[Any], Any]:
        if _is_class(kind):
            row, change = self._row(kind), self._instead.get(kind)
            return row if change is None else lambda value: row(change(value))
        origin, parts = get_origin(kind), get_args(kind)
        if origin is Annotated:
            return self._words or _plain
        if origin is tuple:
            return self._tuple(parts)
        if origin is FrozenMap:
            value_of = self.encoder(parts[1])
            return lambda value: [[k, value_of(v)] for k, v in value.items()]
        if origin in _UNIONS:
            return self._union(_without_none(parts))
        return _plain  # str, int, float, bool; a StrEnum is written as the string it is

    def _union(self, parts: list[Any]) -> Callable[[Any], Any]:
        if len(parts) > 1:
            by_class = {part: (part.__name__, self.encoder(part)) for part in parts}

            def pair(value: Any) -> Any:
                if value is None:
                    return None
                name, encode = by_class[type(value)]
                return [name, encode(value)]

            return pair
        inner = self.encoder(parts[0])
        return inner if inner is _plain else lambda value: None if value is None else inner(value)

    def _row(self, kind: Any) -> Callable[[Any], Any]:
        names = [f.name for f in self._columns(kind)]
        if not names:
            return lambda _value: []
        encoders = [self.encoder(_hints(kind)[name]) for name in names]
        row = attrgetter(*names) if len(names) > 1 else lambda value: (getattr(value, names[0]),)
        changing = [(i, encoder) for i, encoder in enumerate(encoders) if encoder is not _plain]

        def encode(value: Any) -> list[Any]:
            cells = list(row(value))
            for i, encoder in changing:
                cells[i] = encoder(cells[i])
            return cells

        return encode if changing else lambda value: list(row(value))

    def _tuple(self, parts: tuple[Any, ...]) -> Callable[[Any], Any]:
        if len(parts) == 2 and parts[1] is Ellipsis:
            inner = self.encoder(parts[0])
            return list if inner is _plain else lambda value: [inner(v) for v in value]
        encoders = [self.encoder(part) for part in parts]
        return lambda value: [encoder(v) for encoder, v in zip(encoders, value, strict=True)]


# --- reading -----------------------------------------------------------------------------------------


class Decoder:
    """Decoders for the columns that one writer used."""

    def __init__(self, schema: Schema, columns: Callable[[Any], list[Field[Any]]]) -> None:
        self._schema, self._columns = schema, columns
        self._made: dict[Any, Callable[[Any], Any]] = {}

    def decoder(self, kind: Any) -> Callable[[Any], Any]:
        if kind not in self._made:
            self._made[kind] = self._make(_bare(kind))
        return self._made[kind]

    def _make(self, kind: Any) -> Callable[[Any], Any]:
        origin, parts = get_origin(kind), get_args(kind)
        if origin is tuple:
            return self._tuple(parts)
        if origin is FrozenMap:
            key_of, value_of = self.decoder(parts[0]), self.decoder(parts[1])
            return lambda value: FrozenMap((key_of(k), value_of(v)) for k, v in _listed(value))
        if origin in _UNIONS:
            return self._union(_without_none(parts))
        if is_dataclass(kind):
            return self._row(kind)
        if issubclass(kind, Enum):
            return lambda value: kind(_exactly(str, value))
        if kind is float:
            return lambda value: value if type(value) is float else float(_exactly(int, value))
        return lambda value: _exactly(kind, value)

    def _union(self, parts: list[Any]) -> Callable[[Any], Any]:
        if len(parts) == 1:
            inner = self.decoder(parts[0])
            return lambda value: None if value is None else inner(value)
        by_name = {part.__name__: part for part in parts}

        def decode(value: Any) -> Any:
            if value is None:
                return None
            name, row = _listed(value)
            if name not in by_name:
                raise ValueError(f"{name!r:.40} is unknown here")
            return self.decoder(by_name[name])(row)

        return decode

    def _row(self, kind: Any) -> Callable[[Any], Any]:
        columns = self._schema[kind.__name__]
        known = {f.name: f for f in self._columns(kind)}
        for name in columns:
            if name not in known:
                raise ValueError(f"{kind.__name__} has no field {name}")
        for f in known.values():
            if f.name not in columns and f.default is MISSING and f.default_factory is MISSING:
                raise ValueError(f"{kind.__name__}.{f.name} is missing")
        decoders = [self.decoder(_hints(kind)[name]) for name in columns]

        def decode(value: Any) -> Any:
            cells = [decoder(cell) for decoder, cell in zip(decoders, _listed(value), strict=True)]
            return kind(**dict(zip(columns, cells, strict=True)))

        return decode

    def _tuple(self, parts: tuple[Any, ...]) -> Callable[[Any], Any]:
        if len(parts) == 2 and parts[1] is Ellipsis:
            inner = self.decoder(parts[0])
            return lambda value: tuple(inner(v) for v in _listed(value))
        decoders = [self.decoder(part) for part in parts]
        return lambda value: tuple(decoder(v) for decoder, v in zip(decoders, _listed(value), strict=True))


def _listed(value: Any) -> list[Any]:
    return _exactly(list, value)  # type: ignore[no-any-return]


def _exactly(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.60} is not of type {kind.__name__}")
    return value
