"""Read a checkpoint of torch.distributed.checkpoint (DCP) of any program, without executing code in it.

Only the regions that are asked for are read. A checkpoint may have several folders, each with a `.metadata`: accelerate
writes one for the model and one for each optimizer.
"""

from __future__ import annotations

import json
import math
import struct
import time
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ddp.elastic import commits
from ddp.elastic.files import dcp, part_file
from ddp.elastic.files.dcp import Fragment, StoredPlace, StoredRegion, Table, TensorEntry, UnreadableMetadata
from ddp.elastic.files.folders import Folder, open_folder
from ddp.elastic.files.part_file import FOOTER_BYTES, FileIndex, read_again
from ddp.elastic.images import leaves
from ddp.elastic.images.image import DamagedImage, dtype_of, head_of, read_plain
from ddp.telemetry.coded import CodedError

if TYPE_CHECKING:
    import os

    from ddp.elastic.images.leaves import Region


# The manifest of a commit: the file `.metadata` of torch.distributed.checkpoint (DCP), which makes it a checkpoint.
#
#     pickle of DCP | facts about the commit in JSON | footer
#
# DCP stops to read at the end of the pickle. No rank waits for others to write the manifest: each rank that has written
# its part looks whether all parts are there, and if so, it writes the manifest. The last rank finds all. If two ranks
# do, they write the same. If none did, because a store gave all of them a listing from before or a process was killed,
# rank 0 writes it when it removes old commits.

_MAGIC = b"ddpmani1"
_LOOKS, _PAUSE_S = 3, 1.0  # at a store whose listing is stale
_END = 256 << 10  # of a part, read in the hope that it holds the index
_FOOTER = struct.Struct("<8sIIQ")  # magic, checksum, length of the facts, length of the pickle


@dataclass(frozen=True, slots=True)
class CommitFacts:
    number: int
    lineage: str
    world_size: int
    bytes_of_parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    facts: CommitFacts | None  # None: not written by us
    pickle: memoryview

    def table(self) -> Table:
        return dcp.read(self.pickle)


class Maker:
    """Makes manifests. The description of the tensors is kept: it is long, and the same in most commits."""

    def __init__(self) -> None:
        self._known: tuple[tuple[int, ...], Fragment] = ((), dcp.Fragment(b"", b"", b""))

    def make(self, indexes: dict[str, FileIndex]) -> bytes:
        """The bytes of a manifest. `indexes`: of all parts in their order, by the names of their files."""
        layouts = tuple(index.layout_sum for index in indexes.values())
        if self._known[0] != layouts:
            self._known = (layouts, dcp.fragment(part_file.tables_of(indexes)))
        values = [dcp.fragment(index.values(file)) for file, index in indexes.items()]
        pickled = dcp.pickled([self._known[1], *values])
        head = head_of(bytes(next(iter(indexes.values())).sections[0]))
        sizes = tuple(index.footer.file_bytes for index in indexes.values())
        facts = json.dumps(asdict(CommitFacts(head.number, head.lineage, head.world_size, sizes))).encode()
        checksum = zlib.crc32(facts, zlib.crc32(pickled))
        return pickled + facts + _FOOTER.pack(_MAGIC, checksum, len(facts), len(pickled))


def read(data: bytes) -> Manifest:
    """Read a manifest, also one that DCP itself has written. Raise if it is damaged."""
    if len(data) < _FOOTER.size:
        raise DamagedImage(f"too short: {len(data)} bytes")
    magic, checksum, n_facts, n_pickle = _FOOTER.unpack(data[-_FOOTER.size :])
    if magic != _MAGIC:
        return Manifest(None, memoryview(data))
    if n_facts + n_pickle + _FOOTER.size != len(data) or zlib.crc32(data[: -_FOOTER.size]) != checksum:
        raise DamagedImage("wrong checksum of the manifest")
    fields = json.loads(data[n_pickle : n_pickle + n_facts])
    facts = CommitFacts(
        fields["number"], fields["lineage"], fields["world_size"], tuple(fields["bytes_of_parts"])
    )
    return Manifest(facts, memoryview(data)[:n_pickle])


def read_indexes(folder: Folder, sizes: dict[str, int]) -> dict[str, FileIndex]:
    """Read the indexes of files of these sizes. Most come with one request per file, for its end."""
    ends = folder.read_ranges([(file, max(0, size - _END), min(size, _END)) for file, size in sizes.items()])
    found = {}
    for (file, size), end in zip(sizes.items(), ends, strict=True):
        footer = part_file.footer_of(end)
        if footer.file_bytes != size:
            raise DamagedImage(f"truncated: {file} has {size} of {footer.file_bytes} bytes")
        index = end[-FOOTER_BYTES - footer.index_bytes : -FOOTER_BYTES]
        if len(index) < footer.index_bytes:
            (index,) = folder.read_ranges([(file, footer.begin, footer.index_bytes)])
        found[file] = FileIndex(footer, index)
    return found


def complete(folder: Folder, maker: Maker, name: commits.DiskName) -> None:
    """Write the manifest of a commit if all of its parts are there. `name`: of the part that this rank has written."""
    mine = commits.file_name(name)
    for n_looks in range(1, _LOOKS + 1):
        sizes = _sizes_of_parts(folder, name.commit, name.parts)
        if mine in sizes or n_looks == _LOOKS or not folder.is_remote:
            break
        time.sleep(n_looks * _PAUSE_S)  # the listing is older than our part
    if len(sizes) == name.parts:
        _write(folder, maker, name.commit, sizes, str(name.part))


def complete_later(folder: Folder, maker: Maker, commit: commits.CommitName, parts: int) -> None:
    """Write the manifest of an earlier commit, whose ranks did not."""
    sizes = _sizes_of_parts(folder, commit, parts)
    if len(sizes) == parts:
        _write(folder, maker, commit, sizes, "later")


def _sizes_of_parts(folder: Folder, commit: commits.CommitName, parts: int) -> dict[str, int]:
    path = commits.folder_name(commit)
    there = {f"{path}/{file}": size for file, size in folder.files_in(path).items()}
    order = [commits.file_name(commits.DiskName(commit, part, parts)) for part in range(parts)]
    return {file: there[file] for file in order if file in there}


def _write(
    folder: Folder, maker: Maker, commit: commits.CommitName, sizes: dict[str, int], writer: str
) -> None:
    path = commits.folder_name(commit)
    found = read_again(folder, lambda: read_indexes(folder, sizes))
    folder.settle(path)  # a manifest must not outlive a loss of power that a part does not
    content = maker.make({file.partition("/")[2]: index for file, index in found.items()})
    folder.write(f"{path}/{commits.MANIFEST}", lambda: [content], f".{writer}{commits.UNFINISHED}")


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
                found = read(bytes(self._folder.read(f"{inner}{commits.MANIFEST}")))
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
