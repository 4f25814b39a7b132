"""A job's state as the bytes that the stores keep (compressed by `rendezvous.rounds.snapshot`).

The state of a small job is one value. That of a large one is two: the *base*, a whole snapshot, and what has changed
since then (`rendezvous.rounds.snapshot`). Most writes replace the changes only. A store writes both values in
one transaction, so that they always belong together.

Writing and reading a state of thousands of nodes takes up to 0.1 s, so it is done in a thread.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from rendezvous.rounds.snapshot import (
    SnapshotUnreadable,
    apply_changes,
    are_changes,
    decode_state,
    encode_changes,
    encode_state,
)
from rendezvous.store.protocol import StoreError
from rendezvous.values.late_dataclass import dataclass

if TYPE_CHECKING:
    from rendezvous.values.job_state import JobState


MANY_NODES = 256
_MANY_BYTES = 32 * 1024
_ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Base:
    state: JobState
    id: bytes


@dataclass(frozen=True, slots=True)
class Packed:
    """`base`: to be stored in the same transaction. Empty: to be deleted; None: the stored one stays, if any."""

    value: bytes
    base: bytes | None
    basis: _Base | None  # of the next write, if this one succeeds


class Packer:
    """Packs the states of one job for one writer, one write after another.

    After `pack`, the base counts as unknown until `stored` is called. So after a write that failed, or whose outcome is
    not known, the next one writes all of the state.
    """

    def __init__(self) -> None:
        self._basis: _Base | None = None
        self._has_base = False  # as far as is known

    async def pack(self, state: JobState) -> Packed:
        basis, self._basis = self._basis, None
        if len(state.members) < MANY_NODES:
            return Packed(encode_state(state), b"" if self._has_base else None, None)
        return await asyncio.to_thread(_packed, state, basis)

    def stored(self, packed: Packed) -> None:
        self._basis = packed.basis
        self._has_base = packed.basis is not None

    async def unpack(self, value: bytes, base: bytes, job_id: str) -> JobState:
        """`base` is empty if there is none. Raises `StoreError`."""
        self._basis, self._has_base = None, bool(base)
        try:
            if len(value) + len(base) < _MANY_BYTES:
                return _unpacked(value, base)
            return await asyncio.to_thread(_unpacked, value, base)
        except SnapshotUnreadable as error:
            raise StoreError(f"cannot read the stored state of job {job_id!r}: {error}") from error


def _packed(state: JobState, basis: _Base | None) -> Packed:
    if basis is not None and (changes := encode_changes(basis.state, basis.id, state)) is not None:
        return Packed(changes, None, basis)
    basis = _Base(state, os.urandom(_ID_BYTES))
    nothing = encode_changes(state, basis.id, state)
    assert nothing is not None
    return Packed(nothing, basis.id + encode_state(state), basis)


def _unpacked(value: bytes, base: bytes) -> JobState:
    if not are_changes(value):
        return decode_state(value)
    if not base:
        raise SnapshotUnreadable(
            "the snapshot that its changes belong to is missing. Restore the store from a backup"
        )
    return apply_changes(value, base[:_ID_BYTES], decode_state(base[_ID_BYTES:]))
