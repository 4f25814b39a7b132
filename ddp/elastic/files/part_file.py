"""One part of a commit as a file of torch.distributed.checkpoint (DCP), and what only we read at its end.

    tensors, each as torch.save writes it | values, likewise | index | footer

The manifest of the commit (`manifest`) tells DCP where each tensor and value is. Our index has the sections of the
image in memory (`image`), which DCP does not know: head, skeleton, private state and layout. It also has a checksum of
each tensor, and one of everything between the tensors. The footer has the lengths of the sections, and the checksum of
the index. So a file that was cut off or damaged is recognized without any other file.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ddp.elastic.files import dcp
from ddp.elastic.files.dcp import Names, StoredPlace, StoredRegion, Table, TensorEntry, key_of
from ddp.elastic.images.image import (
    DamagedImage,
    Image,
    ImageLayout,
    data_checksum,
    dtype_of,
    head_of,
    is_image,
    pieces,
    serialize,
)
from ddp.elastic.images.leaves import Leaf

if TYPE_CHECKING:
    from ddp.elastic.files.folders import Folder

# --- a tensor as torch.save stores it --------------------------------------------------------------
#
# A tensor as `torch.save` stores it, made around bytes that lie in memory already.
#
#     head | bytes of the tensor | tail
#
# `torch.save` writes a zip archive without compression: a pickle with type and shape, the bytes of the tensor, and
# a directory at the end. Everything but the bytes and their checksum depends only on type and shape. So it is made
# once, and the bytes are written from where they are, without a copy. All sizes are also given in the fields of
# zip64, so that tensors of more than 4 GiB are no special case.

ALIGN = 64  # of the bytes of a tensor in a file, so that they can be used where they are
_FOLDER = "archive"
_DATA = f"{_FOLDER}/data/0"
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4sHHHHIIH")
_ZIP64 = struct.Struct("<HHQQ")  # the extra field with the two sizes
_VERSION, _ZIP64_VERSION = 20, 45
_1980 = 0x21  # the first day that zip knows
_SEE_ZIP64 = 0xFFFFFFFF
_PADDING = b"FB"  # the name of torch's own padding
_CRC_IN_LOCAL, _CRC_IN_CENTRAL = 14, 16


@dataclass(frozen=True, slots=True)
class Envelope:
    """What surrounds the bytes of a tensor."""

    head: bytes
    tail: bytes
    _crc_in_head: int
    _crc_in_tail: int

    def around(self, crc: int) -> tuple[bytes, bytes]:
        """Head and tail of an archive whose tensor has this checksum."""
        number = struct.pack("<I", crc)
        at, then = self._crc_in_head, self._crc_in_tail
        return (
            self.head[:at] + number + self.head[at + 4 :],
            self.tail[:then] + number + self.tail[then + 4 :],
        )


def envelope(dtype: str, shape: tuple[int, ...], n_bytes: int, at: int) -> Envelope:
    """The envelope of a contiguous tensor. `at`: where the archive begins in its file."""
    head, directory = bytearray(), bytearray()
    for name, content in (
        ("data.pkl", _pickled(dtype, shape, n_bytes)),
        ("byteorder", b"little"),
        ("version", b"3\n"),
    ):
        path, crc = f"{_FOLDER}/{name}".encode(), zlib.crc32(content)
        directory += _central(path, crc, len(content), len(head), b"")
        head += _local(path, crc, len(content), b"") + content
    path, offset = _DATA.encode(), len(head)
    sizes = _ZIP64.pack(1, 16, n_bytes, n_bytes)
    end = at + offset + _LOCAL.size + len(path) + len(sizes) + 4
    padding = -end % ALIGN
    head += _local(path, 0, _SEE_ZIP64, sizes + _PADDING + struct.pack("<H", padding) + b"Z" * padding)
    in_tail = len(directory) + _CRC_IN_CENTRAL
    directory += _central(path, 0, _SEE_ZIP64, offset, sizes)
    tail = bytes(directory) + _end(len(directory), len(head) + n_bytes)
    return Envelope(bytes(head), tail, offset + _CRC_IN_LOCAL, in_tail)


def is_intact(data: bytes) -> bool:
    """Whether the checksums of an archive are right. torch.load does not compare them.

    No entry has attributes or a comment. Where damage makes a directory of one, torch reads memory that was not
    written.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as opened:
            is_plain = not any(each.external_attr or each.comment for each in opened.infolist())
            return is_plain and opened.testzip() is None
    except Exception:  # whatever a damaged archive leads to
        return False


def _local(path: bytes, crc: int, size: int, extra: bytes) -> bytes:
    version = _ZIP64_VERSION if extra else _VERSION
    return (
        _LOCAL.pack(b"PK\3\4", version, 0, 0, 0, _1980, crc, size, size, len(path), len(extra)) + path + extra
    )


def _central(path: bytes, crc: int, size: int, offset: int, extra: bytes) -> bytes:
    version = _ZIP64_VERSION if extra else _VERSION
    fields = (version, version, 0, 0, 0, _1980, crc, size, size, len(path), len(extra), 0, 0, 0, 0, offset)
    return _CENTRAL.pack(b"PK\1\2", *fields) + path + extra


def _end(length: int, begin: int) -> bytes:
    """The end of the archive: its directory of four files, and where this directory is."""
    end64 = _END64.pack(
        b"PK\6\6", _END64.size - 12, _ZIP64_VERSION, _ZIP64_VERSION, 0, 0, 4, 4, length, begin
    )
    locator = _LOCATOR.pack(b"PK\6\7", 0, begin + length, 1)
    return end64 + locator + _END.pack(b"PK\5\6", 0, 0, 4, 4, _SEE_ZIP64, _SEE_ZIP64, 0)


def _pickled(dtype: str, shape: tuple[int, ...], n_bytes: int) -> bytes:
    """The pickle that `torch.load` turns into a tensor: a call with the storage, its place and the shape.

    It names functions and classes of torch as every file of torch does, so it is not made from today's objects.
    """
    stride = tuple(math.prod(shape[dimension + 1 :]) for dimension in range(len(shape)))
    storage = (
        b"("
        + _text("storage")
        + b"ctorch.storage\nUntypedStorage\n"
        + _text("0")
        + _text("cpu")
        + _integer(n_bytes)
        + b"tQ"
    )
    rest = b"K\0" + _tuple(shape) + _tuple(stride) + b"\x89" + b"ccollections\nOrderedDict\n)R"
    of_type = f"ctorch\n{dtype.removeprefix('torch.')}\n".encode()
    return b"\x80\2ctorch._utils\n_rebuild_tensor_v3\n(" + storage + rest + of_type + b"tR."


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def _integer(number: int) -> bytes:
    return pickle.dumps(number, protocol=2)[2:-1]


def _tuple(numbers: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(_integer, numbers)) + b"t"


# --- the file of a part ----------------------------------------------------------------------------

T = TypeVar("T")

_MAGIC = b"ddppart1"
_READS = 3  # of what a store has sent damaged
_FOOTER = struct.Struct(
    "<8sIIQ6Q"
)  # magic, checksums of index and envelopes, begin and lengths of the sections
FOOTER_BYTES = _FOOTER.size


@dataclass(frozen=True, slots=True)
class _Item:
    """A tensor in the file."""

    leaf: int  # its number in the layout
    envelope: Envelope
    data_at: int  # in the image
    n_bytes: int


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where tensors of this layout go in the file."""

    items: list[_Item]
    layout: bytes
    end: int


class FileEncoder:
    """Makes the files of one rank. What is the same in the next commit is kept."""

    def __init__(self) -> None:
        self._known: tuple[Any, _Plan] | None = None

    def encode(self, source: Image, names: Names) -> Iterator[bytes | memoryview]:
        """The bytes of the file, one after the other.

        The checksum of a tensor is computed when its turn comes, so that the disk writes the earlier ones meanwhile.
        """
        keys = dcp.of(source.skeleton(), names)
        plan = self._plan(source.layout, keys)
        sums = [0] * len(source.layout.leaves)  # 0: not in this file
        around = 0
        for item in plan.items:
            sums[item.leaf] = crc = source.leaf_sum(item.leaf)
            head, tail = item.envelope.around(crc)
            around = zlib.crc32(tail, zlib.crc32(head, around))
            yield head
            yield from pieces(source.data[item.data_at : item.data_at + item.n_bytes])
            yield tail
        rows, at = [], plan.end
        for path, value in keys.values if source.head.part == 0 else ():
            content = serialize(value)
            around = zlib.crc32(content, around)
            rows.append([path, at, len(content)])
            at += len(content)
            yield content
        sections = (
            *map(bytes, source.sections()),
            plan.layout,
            struct.pack(f"<{len(sums)}I", *sums),
            json.dumps(rows).encode(),
        )
        index = b"".join(sections)
        yield index
        yield _FOOTER.pack(_MAGIC, zlib.crc32(index), around, at, *map(len, sections))

    def _plan(self, layout: ImageLayout, keys: dcp.StateKeys) -> _Plan:
        known = (layout.leaves, layout.offsets, keys.tensors)
        if self._known is None or self._known[0] != known:
            self._known = (known, _plan(layout, keys))
        return self._known[1]


def _plan(layout: ImageLayout, keys: dcp.StateKeys) -> _Plan:
    items, rows, end = [], [], 0
    names = {layout.leaves[number].path: key for number, key in keys.tensors.items()}
    for number, (leaf, data_at) in enumerate(zip(layout.leaves, layout.offsets, strict=True)):
        at, length = -1, 0
        begin = end
        if data_at >= 0:
            made = envelope(str(leaf.dtype), leaf.local_shape, leaf.n_bytes, begin)
            items.append(_Item(number, made, data_at, leaf.n_bytes))
            at, length = begin + len(made.head), len(made.head) + leaf.n_bytes + len(made.tail)
            end += length
        described = [leaf.path, str(leaf.dtype), leaf.shape, leaf.stride, leaf.region, leaf.sharded]
        rows.append([*described, at, begin, length, keys.tensors.get(number, names.get(leaf.path))])
    return _Plan(items, json.dumps(rows).encode(), end)


# --- reading -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Footer:
    """The end of a file, which says where the rest is."""

    index_sum: int
    around: int
    begin: int
    lengths: tuple[int, ...]

    @property
    def index_bytes(self) -> int:
        return sum(self.lengths)

    @property
    def file_bytes(self) -> int:
        return self.begin + self.index_bytes + FOOTER_BYTES


def footer_of(data: bytes | memoryview) -> Footer:
    if len(data) < FOOTER_BYTES:
        raise DamagedImage(f"too short: {len(data)} bytes")
    magic, index_sum, around, begin, *lengths = _FOOTER.unpack(data[-FOOTER_BYTES:])
    if magic != _MAGIC:
        raise DamagedImage("truncated, or not a commit file: its end is missing")
    return Footer(index_sum, around, begin, tuple(lengths))


class FileIndex:
    """The index of a file, checked."""

    def __init__(self, footer: Footer, data: bytes | memoryview) -> None:
        if len(data) != footer.index_bytes:
            raise DamagedImage(f"truncated: the index has {len(data)} of {footer.index_bytes} bytes")
        if zlib.crc32(data) != footer.index_sum:
            raise DamagedImage("wrong checksum of the index")
        self.footer = footer
        self.sections, at = [], 0
        for length in footer.lengths:
            self.sections.append(memoryview(data)[at : at + length])
            at += length
        self.layout_sum = zlib.crc32(self.sections[3])

    def rows(self) -> list[list[Any]]:
        found: list[list[Any]] = json.loads(bytes(self.sections[3]))
        return found

    def sums(self) -> list[int]:
        return list(struct.unpack(f"<{len(self.sections[4]) // 4}I", self.sections[4]))

    def values(self, file: str) -> Table:
        """The values in this file, as DCP needs them."""
        rows = [
            (tuple(path), StoredPlace(file, at, length))
            for path, at, length in json.loads(bytes(self.sections[5]))
        ]
        return Table(
            {}, {key_of(path): place for path, place in rows}, {key_of(path): path for path, _place in rows}
        )


def tables_of(indexes: dict[str, FileIndex]) -> Table:
    """The tensors of all parts of a commit, as DCP needs them. `indexes`: by the names of their files."""
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    chunks: dict[str, dict[tuple[int, ...], StoredRegion]] = {}
    paths = {}
    for file, index in indexes.items():
        for _path, dtype, shape, _stride, region, sharded, at, begin, length, key in index.rows():
            if key is None:  # DCP does not see what belongs to one rank
                continue
            name = key_of(key)
            paths[name] = tuple(key)
            shapes.setdefault(name, (dtype, tuple(shape)))
            sizes = tuple(size for _start, size in region)
            if at >= 0 and not (sharded and 0 in sizes):  # DCP has no chunk without elements beside others
                offsets = tuple(start for start, _size in region)
                # A number that several ranks keep, each for its piece of a parameter, is there once.
                place = StoredPlace(file, begin, length)
                chunks.setdefault(name, {}).setdefault(offsets, StoredRegion(offsets, sizes, place))
    tensors = {key: TensorEntry(*shapes[key], tuple(chunks.get(key, {}).values())) for key in shapes}
    return Table(tensors, {}, paths)


class PartFile(Image):
    """The part of a commit in a file, with the interface of an image in memory."""

    def __init__(self, buffer: memoryview) -> None:
        footer = footer_of(buffer)
        if footer.file_bytes != len(buffer):
            raise DamagedImage(f"truncated: {len(buffer)} of {footer.file_bytes} bytes")
        self.index = FileIndex(footer, buffer[footer.begin : -FOOTER_BYTES])
        self._head, self._skeleton, self._private, *_rest = self.index.sections
        self.on_disk = True
        self.index_sum, self.data_sum = footer.index_sum, footer.around
        self.data = self.whole = buffer
        self.head = head_of(bytes(self._head))
        self._rows = self.index.rows()
        self._layout_made = ImageLayout(
            tuple(
                Leaf(
                    path,
                    dtype_of(dtype),
                    tuple(shape),
                    tuple(stride),
                    tuple((a, b) for a, b in region),
                    sharded,
                )
                for path, dtype, shape, stride, region, sharded, *_place in self._rows
            ),
            tuple(row[6] for row in self._rows),
            footer.begin,
        )

    @property
    def layout(self) -> ImageLayout:
        return self._layout_made

    def leaf_sums(self) -> list[int]:
        return self.index.sums()

    def check_data(self) -> None:
        """Verify all bytes, on all processors of this rank: checksums are computed without the GIL."""
        stored = zip(self._rows, self.layout.leaves, self.leaf_sums(), strict=True)
        rows = [(*row[6:9], leaf.path, leaf.n_bytes, crc) for row, leaf, crc in stored if row[6] >= 0]
        with ThreadPoolExecutor(min(16, len(os.sched_getaffinity(0)))) as threads:
            found = list(threads.map(lambda row: data_checksum(self.whole[row[0] : row[0] + row[4]]), rows))
        around, end = 0, 0
        for (at, begin, length, path, n_bytes, crc), computed in zip(rows, found, strict=True):
            if computed != crc:
                raise DamagedImage(f"wrong checksum of the data of {path}")
            around = zlib.crc32(
                self.whole[at + n_bytes : begin + length], zlib.crc32(self.whole[begin:at], around)
            )
            end = begin + length
        if data_checksum(self.whole[end : self.index.footer.begin], around) != self.index.footer.around:
            raise DamagedImage("wrong checksum of the data between the tensors")


def read_again(folder: Folder, action: Callable[[], T]) -> T:
    """Repeat an action that found damage in what it read: a store may have sent something else than it has."""
    for _again in range(_READS - 1 if folder.is_remote else 0):
        with contextlib.suppress(DamagedImage):
            return action()
    return action()


def opened(buffer: memoryview) -> Image:
    """Read an image in memory, a file, or a file of release 0.1.0."""
    return Image(buffer) if is_image(buffer) else PartFile(buffer)
