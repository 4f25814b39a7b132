"""A tensor as `torch.save` stores it, made around bytes that lie in memory already.

    head | bytes of the tensor | tail

`torch.save` writes a zip archive without compression: a pickle with type and shape, the bytes of the tensor, and a
directory at the end. Everything but the bytes and their checksum depends only on type and shape. So it is made once,
and the bytes are written from where they are, without a copy. All sizes are also given in the fields of zip64, so that
tensors of more than 4 GiB are no special case.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
import zlib
from dataclasses import dataclass

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

    No entry has attributes or a comment. Where damage makes a directory of one, torch reads memory that nobody has
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
