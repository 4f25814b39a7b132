"""The manifest of a commit: the file `.metadata` of torch.distributed.checkpoint (DCP), which makes it a checkpoint.

    pickle of DCP | facts about the commit in JSON | footer

DCP stops to read at the end of the pickle. No rank waits for others to write the manifest: each rank that has written
its part looks whether all parts are there, and if so, it writes the manifest. The last rank finds all. If two ranks
do, they write the same. If none did, because a store gave all of them a listing from before or a process was killed,
rank 0 writes it when it removes old commits.
"""

from __future__ import annotations

import json
import struct
import time
import zlib
from dataclasses import asdict, dataclass

from ddp.elastic import commits
from ddp.elastic.files import dcp, part_file
from ddp.elastic.files.dcp import Fragment, Table
from ddp.elastic.files.folders import Folder
from ddp.elastic.files.part_file import FOOTER_BYTES, FileIndex, read_again
from ddp.elastic.images.image import DamagedImage, head_of

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
