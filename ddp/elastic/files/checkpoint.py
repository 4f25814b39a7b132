"""Read a checkpoint of torch.distributed.checkpoint (DCP) of any program, without executing code in it.

Only the regions that are asked for are read. A checkpoint may have several folders, each with a `.metadata`: accelerate
writes one for the model and one for each optimizer.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ddp.elastic import commits
from ddp.elastic.files import manifest, part_file
from ddp.elastic.files.dcp import StoredPlace, StoredRegion, Table, TensorEntry, UnreadableMetadata
from ddp.elastic.files.folders import open_folder
from ddp.elastic.images import leaves
from ddp.elastic.images.image import DamagedImage, dtype_of, read_plain
from ddp.telemetry.coded import CodedError

if TYPE_CHECKING:
    import os

    from ddp.elastic.images.leaves import Region


class CheckpointError(CodedError, ValueError):
    """A checkpoint that cannot be read."""

    code = "DDP-8001"


class Checkpoint:
    """The tensors and values of a checkpoint, by their keys."""

    def __init__(self, path: str | os.PathLike[str], patience_s: float | None = None) -> None:
        self.name = str(path)
        self._folder = open_folder(path, patience_s)
        self.table = Table({}, {}, {})
        self._has_checksums = False  # those of other programs may be switched off
        for inner in _folders(path):
            try:
                found = manifest.read(bytes(self._folder.read(f"{inner}{commits.MANIFEST}")))
                table = found.table()
            except (DamagedImage, UnreadableMetadata) as error:
                raise CheckpointError(
                    f"cannot read {inner}{commits.MANIFEST} in {path}: {error.args[0]}. Use another checkpoint"
                ) from error
            self._has_checksums = found.facts is not None
            if twice := self.table.tensors.keys() & table.tensors.keys():
                raise CheckpointError(
                    f"{path} has {min(twice)} more than once, also in {inner.rstrip('/')}. Name one of its folders"
                )
            _add(self.table, table, inner)

    def tensor(self, key: str, region: Region | None = None) -> torch.Tensor:
        """A tensor, or a region of it."""
        entry = self.table.tensors[key]
        wanted = leaves.whole(entry.shape) if region is None else region
        shape = tuple(length for _start, length in wanted)
        result = torch.empty(shape, dtype=dtype_of(entry.dtype))
        missing = math.prod(shape)
        for chunk in entry.chunks:
            there = tuple(zip(chunk.offsets, chunk.sizes, strict=True))
            common = leaves.overlap(wanted, there)
            if common is not None:
                into = result[common[0]]
                into.copy_(self._load(chunk.place)[common[1]])
                missing -= into.numel()
        if missing > 0:
            raise CheckpointError(f"{self.name} lacks {missing} elements of {key}. Use another checkpoint")
        return result

    def value(self, key: str) -> Any:
        return self._load(self.table.values[key])

    def _load(self, place: StoredPlace) -> Any:
        (data,) = self._folder.read_ranges([(place.file, place.at, place.length)])
        if self._has_checksums and not part_file.is_intact(data):
            raise CheckpointError(
                f"{place.file} in {self.name} is damaged: wrong checksum at byte {place.at}. Use another commit"
            )
        try:
            return read_plain(data)
        except Exception as error:
            raise CheckpointError(
                f"cannot read an object of {place.file} in {self.name} without executing code: {error}. Save plain "
                "values and tensors only, or allow the class with torch.serialization.add_safe_globals()"
            ) from error

    def tree(self, prefix: str) -> Any:
        """The values and tensors below a prefix, as nested dictionaries and lists; KeyError if there are none."""
        if prefix in self.table.values:
            return self.value(prefix)
        if prefix in self.table.tensors:
            return self.tensor(prefix)
        found: dict[Any, Any] = {}
        depth = len(prefix.split("."))
        for key in (*self.table.values, *self.table.tensors):
            if key.startswith(f"{prefix}."):
                path = self.table.paths.get(key, tuple(key.split(".")))[depth:]
                node = found
                for step in path[:-1]:
                    node = node.setdefault(step, {})
                node[path[-1]] = self.tree(key)
        if not found:
            raise KeyError(prefix)
        return _with_lists(found)


def _with_lists(node: Any) -> Any:
    """Dictionaries whose keys are the numbers of a list become one."""
    if not isinstance(node, dict):
        return node
    inner = {key: _with_lists(value) for key, value in node.items()}
    is_list = inner and all(isinstance(key, int) for key in inner)
    return [inner[key] for key in sorted(inner)] if is_list else inner


def _folders(path: str | os.PathLike[str]) -> list[str]:
    """The folders with metadata in a checkpoint: itself, or the ones in it."""
    local = Path(path)
    if "://" in str(path) or (local / commits.MANIFEST).is_file():
        return [""]
    inner = sorted(each.parent.name for each in local.glob(f"*/{commits.MANIFEST}"))
    if not inner or commits.parse_folder_name(inner[0]) is not None:
        what = (
            "a folder of commits: name one of them"
            if inner
            else f"not a checkpoint: it has no {commits.MANIFEST}"
        )
        raise CheckpointError(f"cannot read {path}: it is {what}")
    return [f"{each}/" for each in inner]


def _add(table: Table, other: Table, inner: str) -> None:
    def moved(place: StoredPlace) -> StoredPlace:
        return replace(place, file=f"{inner}{place.file}")

    for key, entry in other.tensors.items():
        chunks = tuple(StoredRegion(each.offsets, each.sizes, moved(each.place)) for each in entry.chunks)
        table.tensors[key] = TensorEntry(entry.dtype, entry.shape, chunks)
    table.values.update((key, moved(place)) for key, place in other.values.items())
    table.paths.update(other.paths)
