"""An object store that lies by a seed, as a file system of fsspec: `lying://run`.

It is in the memory of the process. An object appears when all of it has arrived, as in S3. Each request can fail, or
get an answer that is not true. After at most `patience` lies about one thing comes the truth about it.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from typing import Any, ClassVar

import fsspec
from fsspec.spec import AbstractFileSystem

BURST = 4  # requests that fail one after the other: errors 5xx, or a line that is cut
# What it can do to a request, and how often of a thousand
KINDS = {
    "error 503": 40,
    "cut": 20,
    "stale listing": 250,
    "unseen object": 250,
    "truncated body": 200,
    "flipped bit": 100,
    "swallowed upload": 150,
}


class Unavailable(OSError):
    pass


class World:
    """The objects, and the lies that are still to come."""

    def __init__(self, seed: int = 0, kinds: dict[str, int] | None = None, patience: int = 2) -> None:
        self.objects: dict[str, bytes] = {}
        self.told: Counter[str] = Counter()
        self._kinds, self._patience = kinds or {}, patience
        self._rng, self._in_a_row = random.Random(seed), Counter[str]()
        self._failing = 0
        self._lock = threading.Lock()

    def lies(self, kind: str, about: str) -> bool:
        with self._lock:
            key = f"{kind} {about}"
            if self._rng.randrange(1000) >= self._kinds.get(kind, 0) or self._in_a_row[key] >= self._patience:
                self._in_a_row[key] = 0
                return False
            self._in_a_row[key] += 1
            self.told[kind] += 1
            return True

    def request(self) -> None:
        """Begin a request, which can fail."""
        with self._lock:
            if self._failing:
                self._failing -= 1
                raise Unavailable("503 Slow Down")
        if self.lies("error 503", ""):
            self._failing = self._rng.randrange(BURST)
            raise Unavailable("503 Slow Down")
        if self.lies("cut", ""):
            self._failing = self._rng.randrange(BURST)
            raise ConnectionResetError("the line is cut")

    def wrong(self, data: bytes, about: str) -> bytes:
        if data and self.lies("truncated body", about):
            return data[: self._rng.randrange(len(data))]
        if data and self.lies("flipped bit", about):
            at = self._rng.randrange(len(data))
            return data[:at] + bytes([data[at] ^ 1 << self._rng.randrange(8)]) + data[at + 1 :]
        return data


class _Upload:
    """An object on its way."""

    def __init__(self, world: World, path: str) -> None:
        self._world, self._path, self._data = world, path, bytearray()
        self.closed = False

    def write(self, data: bytes) -> int:
        self._world.request()
        self._data += data
        return len(data)

    def close(self) -> None:
        self._world.request()
        if not self._world.lies("swallowed upload", self._path):
            self._world.objects[self._path] = bytes(self._data)

    def discard(self) -> None:
        pass


class LyingStore(AbstractFileSystem):
    protocol = "lying"
    cachable = False
    world: ClassVar[World] = World()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return path.removeprefix("lying://").rstrip("/")

    def find(self, path: str, *_args: Any, **_options: Any) -> dict[str, dict[str, Any]]:
        self.world.request()
        there = sorted(name for name in self.world.objects if name.startswith(f"{path}/"))
        if there and self.world.lies("stale listing", path):
            there = there[: random.Random(len(there)).randrange(len(there))]
        return {name: self._facts(name) for name in there}

    def info(self, path: str, **_options: Any) -> dict[str, Any]:
        self.world.request()
        if path not in self.world.objects or self.world.lies("unseen object", path):
            raise FileNotFoundError(path)
        return self._facts(path)

    def _facts(self, path: str) -> dict[str, Any]:
        return {"name": path, "size": len(self.world.objects[path]), "type": "file"}

    def cat_ranges(
        self, paths: list[str], starts: list[int], ends: list[int], **_options: Any
    ) -> list[bytes]:
        self.world.request()
        found = []
        for path, start, end in zip(paths, starts, ends, strict=True):
            if path not in self.world.objects or self.world.lies("unseen object", path):
                raise FileNotFoundError(path)
            found.append(self.world.wrong(self.world.objects[path][start:end], path))
        return found

    def open(self, path: str, *_args: Any, **_options: Any) -> _Upload:
        self.world.request()
        return _Upload(self.world, path)

    def rm(self, path: list[str], *_args: Any, **_options: Any) -> None:
        self.world.request()
        for each in path:
            self.world.objects.pop(each, None)


fsspec.register_implementation("lying", LyingStore, clobber=True)
