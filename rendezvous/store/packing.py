"""A job's state as the bytes that the stores keep (compressed by `rendezvous.rounds.snapshot`).

Reading a state of thousands of nodes takes 0.1 s, so it is done in a thread.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rendezvous.rounds.snapshot import SnapshotUnreadable, decode_state, encode_state
from rendezvous.store.protocol import StoreError

if TYPE_CHECKING:
    from rendezvous.values.state import JobState


_MANY_NODES = 256
_MANY_BYTES = 32 * 1024


async def pack(state: JobState) -> bytes:
    if len(state.members) < _MANY_NODES:
        return encode_state(state)
    return await asyncio.to_thread(encode_state, state)


async def unpack(packed: bytes, job_id: str) -> JobState:
    try:
        if len(packed) < _MANY_BYTES:
            return decode_state(packed)
        return await asyncio.to_thread(decode_state, packed)
    except SnapshotUnreadable as error:
        raise StoreError(f"cannot read the stored state of job {job_id!r}: {error}") from error
