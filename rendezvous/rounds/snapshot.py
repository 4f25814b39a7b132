"""A job's state as bytes, for the state storage: compressed JSON that contains its own schema. It is never executed.

    magic, then zlib( {"schema": {"Member": ["agent", "facts", ...], ...}, "state": [...]} )

`values/rows.py` says how a value becomes a row. The reader rejects everything that it cannot read exactly: a service
that starts with a wrong state is worse than a service that does not start.

`snapshot_changes` has the format of what has changed since a snapshot (format 3).

Changes in format 2: `doubt`, `suspects` and `stopped` replace `Cause.uncertain`, `Decision.nodes` is new, and
`NodeFacts.topology` is removed.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

from rendezvous.values.rows import Decoder, Encoder, kept_fields
from rendezvous.values.state import JobState

_FAMILY = b"ddp-job "
_MAGIC = _FAMILY + b"2\n"  # the number grows when a stored field is renamed or removed
_LEVEL = 1  # a state of 4,096 nodes: a tenth of the size, in a few tens of milliseconds
_LARGEST = 256 * 1024 * 1024  # unpacked; a corrupt or hostile snapshot must not take all memory

_ROWS = Encoder(kept_fields)
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
