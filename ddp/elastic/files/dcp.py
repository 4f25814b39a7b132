"""Checkpoints of torch.distributed.checkpoint (DCP): the file `.metadata`, and the names of what a State holds."""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ddp.elastic.images import leaves
from ddp.telemetry.coded import CodedError

# --- the file .metadata ----------------------------------------------------------------------------
#
# The file `.metadata` of a checkpoint of torch.distributed.checkpoint (DCP): made, and read safely.
#
# The file is a pickle. It says for each name in a checkpoint which file has which region of the tensor, or the
# bytes of the value. DCP reads it with `pickle.load`, which can execute code. `read` accepts only the classes of
# such a pickle, and makes plain records of them. `pickled` writes the pickle itself, because torch's classes would
# have to be imported for it: that takes a second, and there may be hundreds of thousands of objects.

Path = tuple[str | int, ...]
_METADATA = "torch.distributed.checkpoint.metadata"
_STORAGE = "torch.distributed.checkpoint.filesystem"


class UnreadableMetadata(CodedError, ValueError):
    """A `.metadata` file that cannot be used; the text gives the reason."""

    code = "DDP-8001"


@dataclass(frozen=True, slots=True)
class StoredPlace:
    """Where an object of a checkpoint is stored, as `torch.save` has written it."""

    file: str
    at: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredRegion:
    """A region of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: StoredPlace


@dataclass(frozen=True, slots=True)
class TensorEntry:
    dtype: str  # "torch.float32"
    shape: tuple[int, ...]
    chunks: tuple[StoredRegion, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """The contents of a checkpoint by key: the parts of its path, joined by dots."""

    tensors: dict[str, TensorEntry]
    values: dict[str, StoredPlace]
    paths: dict[str, Path]


def key_of(path: Path) -> str:
    return ".".join(map(str, path))


# --- writing -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fragment:
    """Pickled items of the three dictionaries in the file. They are made apart, because most of them stay the same."""

    described: bytes
    paths: bytes
    stored: bytes


def fragment(table: Table) -> Fragment:
    described, stored = [], []
    for key, entry in table.tensors.items():
        chunks = [_chunk(chunk) for chunk in entry.chunks]
        properties = _global("torch", entry.dtype.removeprefix("torch.")) + _STRIDED + b"\x89" + _CONTIGUOUS
        state = {
            "properties": _instance(_METADATA, "TensorProperties", b"(" + properties + b"\x89t"),
            "size": _size(entry.shape),
            "chunks": b"](" + b"".join(chunks) + b"e",
        }
        described.append(_plain(key) + _instance(_METADATA, "TensorStorageMetadata", _dict(state)))
        stored += [_stored(key, chunk.place, _size(chunk.offsets)) for chunk in entry.chunks]
    for key, place in table.values.items():
        described.append(_plain(key) + _instance(_METADATA, "BytesStorageMetadata", b"}"))
        stored.append(_stored(key, place, b"N"))
    paths = [_plain(key) + _plain(path) for key, path in table.paths.items()]
    return Fragment(b"".join(described), b"".join(paths), b"".join(stored))


def pickled(fragments: Iterable[Fragment]) -> bytes:
    each = list(fragments)
    state = {
        "state_dict_metadata": b"}(" + b"".join(one.described for one in each) + b"u",
        "planner_data": b"}(" + b"".join(one.paths for one in each) + b"u",
        "storage_data": b"}(" + b"".join(one.stored for one in each) + b"u",
        "storage_meta": _instance(
            _METADATA,
            "StorageMeta",
            _dict({"checkpoint_id": b"N", "save_id": b"N", "load_id": b"N", "modules": b"]"}),
        ),
        "version": _plain("1.0.0"),
    }
    return b"\x80\2" + _instance(_METADATA, "Metadata", _dict(state)) + b"."


def _stored(key: str, place: StoredPlace, offset: bytes) -> bytes:
    index = {"fqn": _plain(key), "offset": offset, "index": b"N"}
    info = {"relative_path": place.file, "offset": place.at, "length": place.length}
    return _instance(_METADATA, "MetadataIndex", _dict(index)) + _instance(
        _STORAGE, "_StorageInfo", _plain(info)
    )


def _chunk(chunk: StoredRegion) -> bytes:
    state = {"offsets": _size(chunk.offsets), "sizes": _size(chunk.sizes)}
    return _instance(_METADATA, "ChunkStorageMetadata", _dict(state))


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _instance(module: str, name: str, state: bytes) -> bytes:
    """An object that is made without its constructor."""
    return _global(module, name) + b")\x81" + state + b"b"


def _dict(pickled_values: dict[str, bytes]) -> bytes:
    return b"}(" + b"".join(_plain(key) + value for key, value in pickled_values.items()) + b"u"


def _size(shape: tuple[int, ...]) -> bytes:
    return _global("torch", "Size") + _plain(shape) + b"\x85R"


def _plain(value: Any) -> bytes:
    """A value of Python's own types. It may not refer to earlier ones, as pickle does it: fragments are moved."""
    if isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(text)) + text
    if isinstance(value, tuple):
        return b"(" + b"".join(map(_plain, value)) + b"t"
    if isinstance(value, dict):
        return _dict({key: _plain(each) for key, each in value.items()})
    return pickle.dumps(value, protocol=2)[2:-1]


_STRIDED = _global("torch.serialization", "_get_layout") + _plain(("torch.strided",)) + b"R"
_CONTIGUOUS = _global(_METADATA, "_MEM_FORMAT_ENCODING") + _plain((0,)) + b"R"

# --- reading -----------------------------------------------------------------------------------------


class _Record:
    """Stands for an object of torch; has its fields."""

    def __setstate__(self, state: Any) -> None:
        self.fields: Any = state

    def get(self, name: str) -> Any:
        try:
            return self.fields[name]
        except (AttributeError, KeyError, TypeError, IndexError):
            return None


class _Metadata(_Record):
    pass


class _Tensor(_Record):
    pass


class _Value(_Record):
    pass


class _Index(_Record):
    pass


class _Info(_Record):
    pass


def _ignored(*_words: Any) -> None:
    return None


_ACCEPTED: dict[tuple[str, str], Any] = {
    (_METADATA, "Metadata"): _Metadata,
    (_METADATA, "TensorStorageMetadata"): _Tensor,
    (_METADATA, "BytesStorageMetadata"): _Value,
    (_METADATA, "ChunkStorageMetadata"): _Record,
    (_METADATA, "TensorProperties"): _Record,
    (_METADATA, "StorageMeta"): _Record,
    (_METADATA, "MetadataIndex"): _Index,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _ignored,
    (_STORAGE, "_StorageInfo"): _Info,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _ignored,
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): _ignored,
    ("pathlib", "Path"): _ignored,
    ("pathlib._local", "PosixPath"): _ignored,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name.isidentifier() and name.islower():
            return f"torch.{name}"  # a dtype
        try:
            return _ACCEPTED[module, name]
        except KeyError:
            raise UnreadableMetadata(
                f"it contains {module}.{name}, which a checkpoint of torch.distributed.checkpoint does not contain"
            ) from None


def read(data: bytes | memoryview) -> Table:
    """Read the pickle at the beginning of these bytes, without executing code in it."""
    try:
        metadata = _Reader(io.BytesIO(data)).load()
        if not isinstance(metadata, _Metadata):
            raise UnreadableMetadata("it is not the metadata of a checkpoint")
        return _table(metadata)
    except UnreadableMetadata:
        raise
    except Exception as error:  # whatever a damaged pickle leads to
        raise UnreadableMetadata(f"it is damaged: {error!r}") from error


def _table(metadata: _Metadata) -> Table:
    stored: dict[tuple[str, tuple[int, ...] | None], StoredPlace] = {}
    for index, info in (metadata.get("storage_data") or {}).items():
        if not isinstance(index, _Index) or not isinstance(info, _Info):
            raise UnreadableMetadata("DCP's FileSystemWriter did not write it")
        if info.get("transform_descriptors"):
            raise UnreadableMetadata(
                f"its files are transformed by {info.get('transform_descriptors')}. Save it without extensions"
            )
        offset = index.get("offset")
        place = StoredPlace(info.get("relative_path"), info.get("offset"), info.get("length"))
        stored[index.get("fqn"), None if offset is None else tuple(offset)] = place
    tensors, values = {}, {}
    for key, entry in metadata.get("state_dict_metadata").items():
        if isinstance(entry, _Value):
            values[key] = stored[key, None]
            continue
        chunks = []
        for each in entry.get("chunks"):
            offsets = tuple(each.get("offsets"))
            chunks.append(StoredRegion(offsets, tuple(each.get("sizes")), stored[key, offsets]))
        tensors[key] = TensorEntry(
            str(entry.get("properties").get(0)), tuple(entry.get("size")), tuple(chunks)
        )
    paths = metadata.get("planner_data") or {}
    return Table(tensors, values, {key: tuple(path) for key, path in paths.items()})


# --- names -----------------------------------------------------------------------------------------
#
# The names of a State's tensors and values in a checkpoint of torch.distributed.checkpoint (DCP).
#
# DCP names each leaf of a tree by its path. `State(model=..., optimizer=..., step=0)` becomes `model.0.weight`,
# `optimizer.state.0.weight.exp_avg`, `optimizer.param_groups.0.lr` and `step`. In the state of an optimizer,
# parameters have the names that they have in the model, as in
# `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`.

Names = dict[str, tuple[str, ...]]  # of each optimizer: the names of its parameters, in its order

_WRAPPERS = (
    "_orig_mod.",
    "_checkpoint_wrapped_module.",
)  # torch.compile and activation checkpointing add them


@dataclass(frozen=True, slots=True)
class StateKeys:
    tensors: dict[int, Path]  # by the number in the skeleton
    values: list[tuple[Path, Any]]


def bare(name: str) -> str:
    """A name in a module, without the wrappers around its parts."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def of(skeleton: dict[str, Any], names: Names) -> StateKeys:
    """The paths of all tensors, and all other values with their paths."""
    tree = skeleton["fields"] | {
        name: _by_name(each, names[name]) if name in names else each
        for name, each in skeleton["objects"].items()
    }
    found = StateKeys({}, [])
    taken: set[str] = set()

    def unique(path: Path) -> Path:
        while (key := key_of(path)) in taken:  # {"a.b": 1, "a": {"b": 2}}
            path = (*path[:-1], f"{path[-1]}~")
        taken.add(key)
        return path

    def visit(value: Any, path: Path) -> None:
        if (number := leaves.marked(value)) is not None:
            found.tensors[number] = unique(path)
        elif isinstance(value, dict):
            for key, inner in value.items():
                visit(inner, (*path, bare(str(key))))
        elif _is_opened(value):
            for number, inner in enumerate(value):
                visit(inner, (*path, number))
        else:
            found.values.append((unique(path), value))

    for name, each in tree.items():
        visit(each, (name,))
    return found


def _by_name(state: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    def name_of(number: Any) -> Any:
        return names[number] if isinstance(number, int) and number < len(names) else number

    return state | {
        "state": {name_of(number): each for number, each in state["state"].items()},
        "param_groups": [
            group | {"params": [name_of(number) for number in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def _is_opened(value: Any) -> bool:
    """Whether a list has keys for its elements: DCP opens lists with tensors or dictionaries."""
    if isinstance(value, list):
        return any(
            isinstance(each, dict) or leaves.marked(each) is not None or _is_opened(each) for each in value
        )
    return isinstance(value, tuple) and any(
        leaves.marked(each) is not None or _is_opened(each) for each in value
    )
