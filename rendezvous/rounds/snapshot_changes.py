"""What has changed in a job's state since an earlier snapshot, as bytes: for one node of thousands, they are few.

    magic, then zlib( {"base": ID, "schema": ..., "fields": {NAME: VALUE, ...}, "maps": {NAME: [KEYS, ENTRIES], ...}} )

The changes are those since the *base*, a whole snapshot that is stored beside them, and not those since the last write.
So two values are enough to read a state, and each write replaces the changes as a whole. ID names the base.

A state shares its unchanged parts with the states before it, so what has changed is found mostly by identity: a field
as a whole, or the keys of a map that have left it and its entries that are new (rendezvous/values/frozen_map.py).
Leases are not written: their times change with every heartbeat, and whoever reads a state renews them all (`resume`).
"""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from rendezvous.rounds.snapshot import SnapshotUnreadable, unpacked
from rendezvous.values.frozen_map import FrozenMap
from rendezvous.values.rows import Decoder, Encoder, kept_fields
from rendezvous.values.state import JobState

_MAGIC = b"ddp-job 3\n"  # a release that does not know changes says so, because it reads format 2 only
_LEVEL = 1
_LEASES = "leases"
_ROWS = Encoder(kept_fields)
_FEW = 16  # if more entries than one for so many nodes have changed, a whole snapshot is written again


@cache
def _kinds() -> dict[str, Any]:
    """The fields that may change, with their types."""
    hints = get_type_hints(JobState, include_extras=True)
    return {f.name: hints[f.name] for f in kept_fields(JobState) if f.name != _LEASES}


def _changes_of(kind: Any) -> Any:
    """The type of the changes of a map: keys that have left it, and new entries."""
    key, value = get_args(kind)
    return tuple[tuple[key, ...], tuple[tuple[key, value], ...]]  # type: ignore[valid-type]


def encode_changes(base: JobState, base_id: bytes, state: JobState) -> bytes | None:
    """None: so much has changed that a whole snapshot is better."""
    found = _found(base, state)
    if found is None:
        return None
    whole, maps = found
    kinds = _kinds()
    document = {
        "base": base_id.hex(),
        "schema": _ROWS.schema(JobState),
        "fields": {name: _ROWS.encoder(kinds[name])(getattr(state, name)) for name in whole},
        "maps": {name: _ROWS.encoder(_changes_of(kinds[name]))(changes) for name, changes in maps.items()},
    }
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return _MAGIC + zlib.compress(text.encode(), _LEVEL)


def _found(base: JobState, state: JobState) -> tuple[list[str], dict[str, Any]] | None:
    """The fields that differ, and the changes of maps; None: too many entries."""
    whole: list[str] = []
    maps: dict[str, Any] = {}
    entries = 0
    for name, kind in _kinds().items():
        was, now = getattr(base, name), getattr(state, name)
        if was is now:
            continue
        if get_origin(kind) is not FrozenMap:
            whole += [name] if was != now else []
            continue
        without, fresh = now.changes_since(was)
        if without or fresh:
            maps[name] = without, fresh
            entries += len(without) + len(fresh)
    return None if entries * _FEW > len(state.members) else (whole, maps)


def are_changes(data: bytes) -> bool:
    return data.startswith(_MAGIC)


def apply_changes(data: bytes, base_id: bytes, base: JobState) -> JobState:
    """The state that `data` describes. Raises `SnapshotUnreadable`, for example if `base` is not its base."""
    document = unpacked(data, _MAGIC)
    try:
        if document["base"] != base_id.hex():
            raise SnapshotUnreadable(
                f"the stored changes belong to snapshot {document['base']:.32}, but snapshot {base_id.hex()} is "
                "stored. Restore the store from a backup, or delete the job from the store"
            )
        state = _applied(document, base)
    except SnapshotUnreadable:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise SnapshotUnreadable(
            f"the stored changes do not match this version: {error}. Use the version that wrote them"
        ) from error
    return replace(state, leases=FrozenMap((node, state.as_of) for node in state.members))


def _applied(document: Any, base: JobState) -> JobState:
    schema = {name: tuple(columns) for name, columns in document["schema"].items()}
    rows, kinds = Decoder(schema, kept_fields), _kinds()
    new: dict[str, Any] = {n: rows.decoder(kinds[n])(value) for n, value in document["fields"].items()}
    for name, changes in document["maps"].items():
        without, entries = rows.decoder(_changes_of(kinds[name]))(changes)
        new[name] = getattr(base, name).with_changes(without, entries)
    return replace(base, **new)
