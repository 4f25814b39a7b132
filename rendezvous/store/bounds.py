"""Limits on the values of scripts, checked in one place for every store."""

from __future__ import annotations

from rendezvous.store.protocol import KEY_BYTES, KEYS_PER_JOB, VALUE_BYTES, LimitReached


def check_key(key: str) -> None:
    n = len(key.encode("utf-8", "surrogatepass"))
    if not 0 < n <= KEY_BYTES:
        raise LimitReached(f"invalid key of {n} bytes: use 1 to {KEY_BYTES} bytes")


def check_value(data: bytes) -> None:
    if len(data) > VALUE_BYTES:
        raise LimitReached(f"the value has {len(data)} bytes: at most {VALUE_BYTES} are permitted")


def check_count(held: int) -> None:
    """Check before one more is added."""
    if held >= KEYS_PER_JOB:
        raise LimitReached(
            f"the job already has {KEYS_PER_JOB} values, which is the limit: delete some first"
        )
