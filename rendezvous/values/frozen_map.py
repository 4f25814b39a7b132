"""An immutable map that shares its structure with the maps derived from it.

A job of 10,000 nodes changes one entry at a time, and each of its states is a separate value. Copying a dict per change
would cost O(N). Here a change copies one small bucket and the row of buckets, in one or two microseconds at that size.
The bucket of a key does not depend on Python's seeded string hash. So the order of iteration depends only on the
history, and a replay sees the same order.
"""

from __future__ import annotations

from binascii import crc32
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar, overload

K = TypeVar("K", bound=str | int)
V = TypeVar("V")
D = TypeVar("D")

_WIDTH = 128
_NOTHING: dict[Any, Any] = {}  # shared by all empty buckets, and never changed


def _bucket_of(key: str | int) -> int:
    if isinstance(key, str):
        return crc32(key.encode("utf-8", "surrogatepass")) % _WIDTH
    return key % _WIDTH


class FrozenMap(Generic[K, V]):
    __slots__ = ("_buckets", "_size")

    def __init__(self, items: Iterable[tuple[K, V]] = ()) -> None:
        buckets: list[dict[K, V]] = [_NOTHING] * _WIDTH
        for key, value in items:
            at = _bucket_of(key)
            if buckets[at] is _NOTHING:
                buckets[at] = {}
            buckets[at][key] = value
        self._buckets: tuple[dict[K, V], ...] = tuple(buckets)
        self._size = sum(map(len, buckets))

    def _changed(self, at: int, bucket: dict[K, V], size: int) -> FrozenMap[K, V]:
        changed: FrozenMap[K, V] = object.__new__(FrozenMap)
        changed._buckets = (*self._buckets[:at], bucket, *self._buckets[at + 1 :])
        changed._size = size
        return changed

    def plus(self, key: K, value: V) -> FrozenMap[K, V]:
        at = _bucket_of(key)
        bucket = self._buckets[at]
        return self._changed(at, {**bucket, key: value}, self._size + (key not in bucket))

    def minus(self, key: K) -> FrozenMap[K, V]:
        at = _bucket_of(key)
        bucket = self._buckets[at]
        if key not in bucket:
            return self
        left = {k: v for k, v in bucket.items() if k != key} if len(bucket) > 1 else _NOTHING
        return self._changed(at, left, self._size - 1)

    def changes_since(self, before: FrozenMap[K, V]) -> tuple[list[K], list[tuple[K, V]]]:
        """What `before.with_changes` needs to give this map, with the same order: keys without, then new entries."""
        without: list[K] = []
        entries: list[tuple[K, V]] = []
        for now, was in zip(self._buckets, before._buckets, strict=True):
            if now is was:
                continue
            gone = [key for key in was if key not in now]
            fresh = [(key, value) for key, value in now.items() if key not in was or was[key] != value]
            kept = [key for key in was if key in now]
            if list(now)[: len(kept)] != kept:  # a key that had left is back
                gone, fresh = list(was), list(now.items())
            without += gone
            entries += fresh
        return without, entries

    def with_changes(self, without: Iterable[K], entries: Iterable[tuple[K, V]]) -> FrozenMap[K, V]:
        changed: dict[int, dict[K, V]] = {}
        for key in without:
            at = _bucket_of(key)
            changed.setdefault(at, dict(self._buckets[at])).pop(key)
        for key, value in entries:
            at = _bucket_of(key)
            changed.setdefault(at, dict(self._buckets[at]))[key] = value
        buckets = (changed.get(at, bucket) or _NOTHING for at, bucket in enumerate(self._buckets))
        result: FrozenMap[K, V] = object.__new__(FrozenMap)
        result._buckets = tuple(buckets)
        result._size = sum(map(len, result._buckets))
        return result

    @overload
    def get(self, key: K) -> V | None: ...
    @overload
    def get(self, key: K, default: D) -> V | D: ...
    def get(self, key: K, default: D | None = None) -> V | D | None:
        return self._buckets[_bucket_of(key)].get(key, default)

    def __getitem__(self, key: K) -> V:
        return self._buckets[_bucket_of(key)][key]

    def items(self) -> Iterator[tuple[K, V]]:
        for bucket in filter(None, self._buckets):
            yield from bucket.items()

    def values(self) -> Iterator[V]:
        for bucket in filter(None, self._buckets):
            yield from bucket.values()

    def __iter__(self) -> Iterator[K]:
        for bucket in filter(None, self._buckets):
            yield from bucket

    def __contains__(self, key: K) -> bool:
        return key in self._buckets[_bucket_of(key)]

    def __len__(self) -> int:
        return self._size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FrozenMap) and self._buckets == other._buckets

    def __hash__(self) -> int:
        return hash(frozenset(self.items())) if self._size else 0

    def __repr__(self) -> str:
        return f"FrozenMap({dict(self.items())!r})"


EMPTY: FrozenMap[Any, Any] = FrozenMap()
