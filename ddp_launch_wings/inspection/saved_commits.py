"""What `python -m ddp.elastic` does with the bytes of commits: verify them, and export tensors of one."""

from __future__ import annotations

import ctypes
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import torch

from ddp.elastic import commits
from ddp.elastic.files import manifest, part_file
from ddp.elastic.files.checkpoint import Checkpoint, CheckpointError
from ddp.elastic.files.dcp import UnreadableMetadata
from ddp.elastic.files.folders import Folder, open_folder
from ddp.elastic.images.image import DamagedImage
from ddp.telemetry.coded import WrongValue
from ddp_launch_wings.inspection.commit_list import Listed, check_is_folder, listed

# --- commits, verified and exported -----------------------------------------------------------------


def problems(folder: Folder, one: Listed) -> Iterator[str]:
    """Verify all bytes of a commit; yield what is wrong."""
    if one.parts_there < one.parts:
        yield one.state
    for file in one.files:
        try:
            if commits.parse_file_name(file):
                part_file.opened(folder.read(file)).check_data()
            elif file.endswith(f"/{commits.MANIFEST}"):
                _verify_manifest(folder, file, one)
        except (DamagedImage, UnreadableMetadata, OSError, ValueError) as error:
            yield f"{file}: {error}"


def _verify_manifest(folder: Folder, file: str, one: Listed) -> None:
    read = manifest.read(bytes(folder.read(file)))
    if read.facts is None:
        raise DamagedImage("its end is missing, or another program has written it")
    read.table()
    name = one.commit
    for part, n_bytes in enumerate(read.facts.bytes_of_parts):
        path = commits.file_name(commits.DiskName(name, part, len(read.facts.bytes_of_parts)))
        if one.files.get(path, n_bytes) != n_bytes:
            raise DamagedImage(f"{path} has {one.files[path]} bytes, but the manifest says {n_bytes}")


def checkpoint_at(path: str, patience_s: float | None = None) -> Checkpoint:
    """A checkpoint, or the newest commit with a manifest in a folder of commits."""
    folder = open_folder(path, patience_s)
    if not folder.is_remote:
        check_is_folder(folder.name)
    there = listed(folder)
    whole = [one for one in there if one.state == "complete"]
    if there and not whole:
        raise CheckpointError(
            f"cannot export from {path}: none of its {len(there)} commits is complete and has a {commits.MANIFEST}. "
            "Resume from one of them and commit again"
        )
    if not whole:
        return Checkpoint(path, patience_s)
    newest = max(whole, key=lambda one: one.commit)
    if any(file.endswith(".ddp") for file in newest.files):
        raise CheckpointError(
            f"cannot export commit {newest.commit.number}: it is of release 0.1.0. Resume from it and commit again"
        )
    return Checkpoint(f"{path.rstrip('/')}/{commits.folder_name(newest.commit)}", patience_s)


def export(source: str, target: Path, name: str, patience_s: float | None = None) -> int:
    """Write the tensors of a checkpoint to one file; return their number. `name`: only those of this object."""
    if target.is_dir() or not target.parent.is_dir():
        what = "a folder" if target.is_dir() else "in a folder that does not exist"
        raise WrongValue(f"cannot write {target}: it is {what}. Name a file in a folder that exists")
    checkpoint = checkpoint_at(source, patience_s)
    prefix = f"{name}." if name else ""
    keys = {key.removeprefix(prefix): key for key in checkpoint.table.tensors if key.startswith(prefix)}
    if not keys:
        known = sorted({key.partition(".")[0] for key in checkpoint.table.tensors})
        raise CheckpointError(
            f"{checkpoint.name} has no tensors of {name!r}. It has those of {', '.join(known)}"
        )
    tensors = checkpoint.table.tensors
    described = {short: (tensors[key].dtype, tensors[key].shape) for short, key in keys.items()}
    unfinished = target.with_name(f"{target.name}{commits.UNFINISHED}")
    try:
        with unfinished.open("wb") as file:
            write(file, described, lambda short: checkpoint.tensor(keys[short]), {"format": "pt"})
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)
    return len(keys)


# --- the format safetensors ------------------------------------------------------------------------
#
# Write files in the format `safetensors`: the length of the header, the header in JSON, the bytes of the tensors.

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
