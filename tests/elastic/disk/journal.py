"""What a disk may hold after a loss of power, computed from the record of a process (recorder.c).

POSIX promises little, and this simulation promises no more. What is certain after a cut of the power:

- The data of a file up to the last fsync of this file.
- The names in a folder up to the last fsync of this folder. An fsync of a file says nothing about its name.

Of everything later, any part may have reached the disk, in any order: each page of a write, the new size of a file
without its data (which then reads as zeros), a new name before the data of its file, the second of two renames.
"""

from __future__ import annotations

import os
import random
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_HEAD = struct.Struct("<c3xiiiqII")
_PAGE = 4096


@dataclass(frozen=True)
class Call:
    op: str
    pid: int
    fd: int
    flags: int
    offset: int
    path: str
    more: bytes


def read(file: Path) -> list[Call]:
    data, at, found = file.read_bytes(), 0, []
    while at < len(data):
        op, pid, fd, flags, offset, n_path, n_more = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        path, more = data[at : at + n_path].decode(), data[at + n_path : at + n_path + n_more]
        at += n_path + n_more
        found.append(Call(op.decode(), pid, fd, flags, offset, path, more))
    return found


@dataclass(eq=False)
class _Node:
    """A file or a folder, with all changes of it in their order; the first `synced` of them are on the disk."""

    is_folder: bool
    changes: list[tuple[Any, ...]] = field(default_factory=list)
    synced: int = 0

    def names(self, chosen: list[tuple[Any, ...]]) -> dict[str, _Node]:
        found: dict[str, _Node] = {}
        for gone, name, node in chosen:
            found.pop(gone, None)
            if name is not None:
                found[name] = node
        return found

    def now(self) -> dict[str, _Node]:
        return self.names(self.changes)


class Disk:
    """The files below a root, while calls are played."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._top = _Node(is_folder=True)
        self._open: dict[tuple[int, int], _Node | None] = {}
        self.marks: list[int] = []

    def play(self, call: Call) -> None:
        match call.op:
            case "O":
                self._open[call.pid, call.fd] = self._opened(call)
            case "W":
                self._file(call).changes.append((call.offset, call.more))
            case "S":
                node = self._file(call)
                node.synced = len(node.changes)
            case "N":
                folder, old = self._at(call.path)
                same, new = self._at(call.more.decode())
                assert folder is same, "a rename to another folder is not simulated"
                folder.changes.append((old, new, folder.now()[old]))
            case "D":
                folder, name = self._at(call.path)
                folder.changes.append((None, name, _Node(is_folder=True)))
            case "U" | "X":
                folder, name = self._at(call.path)
                folder.changes.append((name, None, None))
            case "M":
                self.marks.append(call.flags)

    def _file(self, call: Call) -> _Node:
        node = self._open[call.pid, call.fd]
        assert node is not None
        return node

    def _opened(self, call: Call) -> _Node | None:
        if Path(call.path) == self._root:
            return self._top
        folder, name = self._at(call.path)
        node = folder.now().get(name)
        if node is None:
            assert call.flags & os.O_CREAT, call
            node = _Node(is_folder=False)
            folder.changes.append((None, name, node))
        elif call.flags & os.O_TRUNC:
            node.changes.append((0, None))
        return node

    def _at(self, path: str) -> tuple[_Node, str]:
        node = self._top
        *above, name = Path(path).relative_to(self._root).parts
        for each in above:
            node = node.now()[each]
        return node, name

    # --- what there is ---------------------------------------------------------------------------

    def now(self) -> dict[str, bytes]:
        """Without a cut of the power."""
        return _files(self._top, lambda node: node.changes, lambda node: _content(node.changes))

    def after_a_cut(self, seed: int) -> dict[str, bytes]:
        """One of the things that may be left."""
        rng = random.Random(seed)
        share = rng.choice((0.0, 0.3, 0.7, 1.0))  # of the names that were changed last
        pages = rng.choice((0.0, 0.5, 1.0))  # of the data

        def names(node: _Node) -> list[tuple[Any, ...]]:
            later = node.changes[node.synced :]
            return node.changes[: node.synced] + [each for each in later if rng.random() < share]

        def content(node: _Node) -> bytes:
            later = [piece for change in node.changes[node.synced :] for piece in _pieces(change)]
            kept = [each for each in later if rng.random() < pages]
            result = _content(node.changes[: node.synced] + kept)
            if rng.random() < 0.5:  # the size without the data
                result = result.ljust(len(_content(node.changes)), b"\0")
            return result

        return _files(self._top, names, content)


def _pieces(change: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    offset, data = change
    if data is None:
        return [change]
    return [(offset + at, data[at : at + _PAGE]) for at in range(0, len(data), _PAGE)]


def _content(changes: list[tuple[Any, ...]]) -> bytes:
    found = bytearray()
    for offset, data in changes:
        if data is None:
            del found[offset:]
        else:
            if len(found) < offset:
                found.extend(bytes(offset - len(found)))
            found[offset : offset + len(data)] = data
    return bytes(found)


def _files(folder: _Node, names: Any, content: Any, inside: str = "") -> dict[str, bytes]:
    found = {}
    for name, node in folder.names(names(folder)).items():
        if node.is_folder:
            found |= _files(node, names, content, f"{inside}{name}/")
        else:
            found[f"{inside}{name}"] = content(node)
    return found


def lay_out(files: dict[str, bytes], there: Path) -> None:
    there.mkdir()
    for name, data in files.items():
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_bytes(data)
