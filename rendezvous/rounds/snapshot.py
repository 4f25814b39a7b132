"""A job's state as bytes, for the state storage: compressed JSON that contains its own schema. It is never executed.

    magic, then zlib( {"schema": {"Member": ["agent", "facts", ...], ...}, "state": [...]} )

`values/rows.py` says how a value becomes a row. The reader rejects everything that it cannot read exactly: a service
that starts with a wrong state is worse than a service that does not start.

Format 3 is what has changed since a snapshot: a section below describes it.

Changes in format 2: `doubt`, `suspects` and `stopped` replace `Cause.uncertain`, `Decision.nodes` is new, and
`NodeFacts.topology` is removed.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from rendezvous.values.frozen_map import FrozenMap
from rendezvous.values.job_state import JobState
from rendezvous.values.rows import Decoder, RowEncoder, kept_fields

_FAMILY = b"ddp-job "
_MAGIC = _FAMILY + b"2\n"  # the number grows when a stored field is renamed or removed
_LEVEL = 1  # a state of 4,096 nodes: a tenth of the size, in a few tens of milliseconds
_LARGEST = 256 * 1024 * 1024  # unpacked; a corrupt or hostile snapshot must not take all memory

_ROWS = RowEncoder(kept_fields)
_WHAT_NEXT = "Restore the store from a backup, or delete the job from the store"


class SnapshotUnreadable(ValueError):
    """These bytes are not a snapshot, or another version wrote them that is not compatible with this one."""


def encode_state(state: JobState) -> bytes:
    document = {"schema": _ROWS.schema(JobState), "state": _ROWS.encoder(JobState)(state)}
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return _MAGIC + zlib.compress(text.encode(), _LEVEL)


def decode_state(data: bytes) -> JobState:
    document = unpacked(data, _MAGIC)
    try:
        schema = {name: tuple(columns) for name, columns in document["schema"].items()}
        state = Decoder(schema, kept_fields).decoder(JobState)(document["state"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise SnapshotUnreadable(
            f"the snapshot does not match this version: {error}. Use the version that wrote it"
        ) from error
    assert isinstance(state, JobState)
    return state


def unpacked(data: bytes, magic: bytes) -> Any:
    """The JSON in `data`, which must begin with `magic`. Raises `SnapshotUnreadable`."""
    if data.startswith(_FAMILY) and not data.startswith(magic):
        found, own = (
            text[len(_FAMILY) :].split(b"\n")[0][:8].decode("ascii", "replace") for text in (data, magic)
        )
        raise SnapshotUnreadable(
            f"the snapshot has format {found}; this version reads format {own}. Finish the job with the version "
            "that wrote it, or start with an empty store"
        )
    if not data.startswith(magic):
        raise SnapshotUnreadable(
            f"the stored data is not the state of a job: it begins with {data[:16]!r}. Check --store"
        )
    try:
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(data[len(magic) :], _LARGEST)
        if unpacker.unconsumed_tail:
            raise SnapshotUnreadable(f"the snapshot is larger than {_LARGEST:,} bytes. {_WHAT_NEXT}")
        if not unpacker.eof:
            raise SnapshotUnreadable(f"the snapshot is incomplete. {_WHAT_NEXT}")
        return json.loads(text)
    except (zlib.error, ValueError, RecursionError) as error:
        raise SnapshotUnreadable(f"the snapshot is damaged: {error}. {_WHAT_NEXT}") from error


# --- what has changed since a snapshot (format 3): for one node of thousands, it is a few bytes -----
#
#   magic, then zlib( {"base": ID, "schema": ..., "fields": {NAME: VALUE, ...}, "maps": {NAME: [KEYS, ENTRIES], ...}} )
#
# The changes are those since the *base*, a whole snapshot that is stored beside them, and not those since the last
# write. So two values are enough to read a state, and each write replaces the changes as a whole. ID names the base.
#
# A state shares its unchanged parts with the states before it, so what has changed is found mostly by identity: a
# field as a whole, or the keys of a map that have left it and its entries that are new
# (rendezvous/values/frozen_map.py). Leases are not written: their times change with every heartbeat, and whoever
# reads a state renews them all (`resume`).

_MAGIC_OF_CHANGES = (
    b"ddp-job 3\n"  # a release that does not know changes says so, because it reads format 2 only
)
_LEASES = "leases"
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
    found = _changes_since(base, state)
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
    return _MAGIC_OF_CHANGES + zlib.compress(text.encode(), _LEVEL)


def _changes_since(base: JobState, state: JobState) -> tuple[list[str], dict[str, Any]] | None:
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
    return data.startswith(_MAGIC_OF_CHANGES)


def apply_changes(data: bytes, base_id: bytes, base: JobState) -> JobState:
    """The state that `data` describes. Raises `SnapshotUnreadable`, for example if `base` is not its base."""
    document = unpacked(data, _MAGIC_OF_CHANGES)
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
