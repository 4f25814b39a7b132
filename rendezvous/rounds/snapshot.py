"""A job's state as bytes, for the state storage: compressed JSON that contains its own schema. It is never executed.

    magic, then zlib( {"schema": {"Member": ["agent", "facts", ...], ...}, "state": [...]} )

Every dataclass is a row of its fields' values. The schema names the columns of each class once, in the order that the
writer used. So a later version may add a field with a default and still read older snapshots. The reader rejects
everything that it cannot read exactly: an unknown column, a missing column without a default, or a value of another
type. A service that starts with a wrong state is worse than a service that does not start.

Changes in format 2: `doubt`, `suspects` and `stopped` replace `Cause.uncertain`, `Decision.nodes` is new, and
`NodeFacts.topology` is removed.

The encoders and decoders of rows are built once per class from the annotations of `values.state` and `values.types`.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from operator import attrgetter
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from rendezvous.values.frozen_map import FrozenMap
from rendezvous.values.state import JobState

if TYPE_CHECKING:
    from collections.abc import Callable

_FAMILY = b"ddp-job "
_MAGIC = _FAMILY + b"2\n"  # the number grows when a stored field is renamed or removed
_LEVEL = 1  # a state of 4,096 nodes: a tenth of the size, in a few tens of milliseconds
_LARGEST = 256 * 1024 * 1024  # unpacked; a corrupt or hostile snapshot must not take all memory

_WHAT_NEXT = "Restore the store from a backup, or delete the job from the store"


class SnapshotUnreadable(ValueError):
    """These bytes are not a snapshot, or another version wrote them that is not compatible with this one."""


def encode_state(state: JobState) -> bytes:
    classes = {cls.__name__: [f.name for f in _kept(cls)] for cls in _classes(JobState)}
    document = {"schema": classes, "state": _encoder(JobState)(state)}
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return _MAGIC + zlib.compress(text.encode(), _LEVEL)


def decode_state(data: bytes) -> JobState:
    document = _unpacked(data)
    try:
        schema = {name: tuple(columns) for name, columns in document["schema"].items()}
        state = _Decoder(schema).decoder(JobState)(document["state"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise SnapshotUnreadable(
            f"the snapshot does not match this version: {error}. Use the version that wrote it"
        ) from error
    assert isinstance(state, JobState)
    return state


def _unpacked(data: bytes) -> Any:
    if data.startswith(_FAMILY) and not data.startswith(_MAGIC):
        found, own = (
            text[len(_FAMILY) :].split(b"\n")[0][:8].decode("ascii", "replace") for text in (data, _MAGIC)
        )
        raise SnapshotUnreadable(
            f"the snapshot has format {found}; this version reads format {own}. Finish the job with the version "
            "that wrote it, or start with an empty store"
        )
    if not data.startswith(_MAGIC):
        raise SnapshotUnreadable(
            f"the stored data is not the state of a job: it begins with {data[:16]!r}. Check --store"
        )
    try:
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(data[len(_MAGIC) :], _LARGEST)
        if unpacker.unconsumed_tail:
            raise SnapshotUnreadable(f"the snapshot is larger than {_LARGEST:,} bytes. {_WHAT_NEXT}")
        if not unpacker.eof:
            raise SnapshotUnreadable(f"the snapshot is incomplete. {_WHAT_NEXT}")
        return json.loads(text)
    except (zlib.error, ValueError, RecursionError) as error:
        raise SnapshotUnreadable(f"the snapshot is damaged: {error}. {_WHAT_NEXT}") from error


# --- fields of a class -------------------------------------------------------------------------------


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _kept(cls: Any) -> list[Field[Any]]:
    return [f for f in fields(cls) if f.metadata.get("kept", True)]


@cache
def _classes(root: type) -> tuple[type, ...]:
    """Every dataclass that a `root` may contain, starting with `root`."""
    found: dict[type, None] = {}

    def visit(kind: Any) -> None:
        if is_dataclass(kind) and isinstance(kind, type):
            if kind not in found:
                found[kind] = None
                for f in _kept(kind):
                    visit(_hints(kind)[f.name])
            return
        for part in get_args(kind):
            visit(part)

    visit(root)
    return tuple(found)


# --- writing -----------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    return value


@cache
def _encoder(kind: Any) -> Callable[[Any], Any]:
    if isinstance(kind, type) and is_dataclass(kind):
        return _row_encoder(kind)
    origin, parts = get_origin(kind), get_args(kind)
    if origin is tuple:
        return _tuple_encoder(parts)
    if origin is FrozenMap:
        value_of = _encoder(parts[1])
        return lambda value: [[k, value_of(v)] for k, v in value.items()]
    if origin is UnionType:
        inner = _encoder(_optional(parts))
        return inner if inner is _plain else lambda value: None if value is None else inner(value)
    return _plain  # str, int, float, bool; a StrEnum is written as the string it is


def _row_encoder(kind: type) -> Callable[[Any], Any]:
    names = [f.name for f in _kept(kind)]
    encoders = [_encoder(_hints(kind)[name]) for name in names]
    row = attrgetter(*names) if len(names) > 1 else lambda value: (getattr(value, names[0]),)
    changing = [(i, encoder) for i, encoder in enumerate(encoders) if encoder is not _plain]

    def encode(value: Any) -> list[Any]:
        cells = list(row(value))
        for i, encoder in changing:
            cells[i] = encoder(cells[i])
        return cells

    return encode if changing else lambda value: list(row(value))


def _tuple_encoder(parts: tuple[Any, ...]) -> Callable[[Any], Any]:
    if len(parts) == 2 and parts[1] is Ellipsis:
        inner = _encoder(parts[0])
        return list if inner is _plain else lambda value: [inner(v) for v in value]
    encoders = [_encoder(part) for part in parts]
    return lambda value: [encoder(v) for encoder, v in zip(encoders, value, strict=True)]


def _optional(parts: tuple[Any, ...]) -> Any:
    (inner,) = (part for part in parts if part is not NoneType)
    return inner


# --- reading -----------------------------------------------------------------------------------------


class _Decoder:
    """Decoders for the columns that one writer used."""

    def __init__(self, schema: dict[str, tuple[str, ...]]) -> None:
        self._schema = schema
        self._made: dict[Any, Callable[[Any], Any]] = {}

    def decoder(self, kind: Any) -> Callable[[Any], Any]:
        if kind not in self._made:
            self._made[kind] = self._make(kind)
        return self._made[kind]

    def _make(self, kind: Any) -> Callable[[Any], Any]:
        origin, parts = get_origin(kind), get_args(kind)
        if origin is tuple:
            return self._tuple(parts)
        if origin is FrozenMap:
            key_of, value_of = self.decoder(parts[0]), self.decoder(parts[1])
            return lambda value: FrozenMap((key_of(k), value_of(v)) for k, v in _listed(value))
        if origin is UnionType:
            inner = self.decoder(_optional(parts))
            return lambda value: None if value is None else inner(value)
        if is_dataclass(kind):
            return self._row(kind)
        if issubclass(kind, Enum):
            return lambda value: kind(_exactly(str, value))
        if kind is float:
            return lambda value: value if type(value) is float else float(_exactly(int, value))
        return lambda value: _exactly(kind, value)

    def _row(self, kind: Any) -> Callable[[Any], Any]:
        columns = self._schema[kind.__name__]
        known = {f.name: f for f in _kept(kind)}
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
