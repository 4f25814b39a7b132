"""The bounds on what scripts may keep, checked in one place for every store."""

from __future__ import annotations

from rendezvous.store.protocol import KEY_BYTES, KEYS_PER_JOB, VALUE_BYTES, LimitReached


def check_key(key: str) -> None:
    n = len(key.encode("utf-8", "surrogatepass"))
    if not 0 < n <= KEY_BYTES:
        raise LimitReached(f"a key has 1 to {KEY_BYTES} bytes, this one {n}")


def check_value(data: bytes) -> None:
    if len(data) > VALUE_BYTES:
        raise LimitReached(f"a value has at most {VALUE_BYTES} bytes, this one {len(data)}")


def check_count(held: int) -> None:
    """Before one more is added."""
    if held >= KEYS_PER_JOB:
        raise LimitReached(f"a job keeps at most {KEYS_PER_JOB} values")
