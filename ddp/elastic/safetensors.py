"""Write files in the format `safetensors`: the length of the header, the header in JSON, the bytes of the tensors."""

from __future__ import annotations

import ctypes
import json
import math
import struct
from typing import TYPE_CHECKING, BinaryIO

import torch

from ddp.telemetry.coded import WrongValue

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_NAMES = {
    **{"torch.float64": "F64", "torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"},
    **{
        "torch.int64": "I64",
        "torch.int32": "I32",
        "torch.int16": "I16",
        "torch.int8": "I8",
        "torch.bool": "BOOL",
    },
    **{"torch.uint64": "U64", "torch.uint32": "U32", "torch.uint16": "U16", "torch.uint8": "U8"},
    **{"torch.float8_e4m3fn": "F8_E4M3", "torch.float8_e5m2": "F8_E5M2", "torch.complex64": "C64"},
}
_ALIGN = 8


def write(
    file: BinaryIO,
    described: Mapping[str, tuple[str, tuple[int, ...]]],
    tensor: Callable[[str], torch.Tensor],
    metadata: Mapping[str, str],
) -> None:
    """Write tensors, one at a time. `described`: type and shape by name."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    order = sorted(described, key=lambda name: (-_item_bytes(*described[name][:1], name), name))
    for name in order:  # wide types first, so that all tensors are aligned
        dtype, shape = described[name]
        n_bytes = _item_bytes(dtype, name) * math.prod(shape)
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [end, end + n_bytes]}
        end += n_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGN)
    file.write(struct.pack("<Q", len(text)) + text)
    for name in order:
        flat = tensor(name).contiguous().reshape(-1)
        if flat.numel():
            n_bytes = flat.numel() * flat.itemsize
            file.write((ctypes.c_char * n_bytes).from_address(flat.data_ptr()))


def _item_bytes(dtype: str, name: str) -> int:
    if dtype not in _NAMES:
        raise WrongValue(
            f"cannot export {name}: safetensors has no type for {dtype}. Leave it out with --name"
        )
    size: int = getattr(torch, dtype.removeprefix("torch.")).itemsize
    return size
