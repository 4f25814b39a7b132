"""torch's flight recorder of NCCL in the format of several versions: the last operations of each group.

NCCL_LIKE_RECORDER selects the version; torch 2.5 writes 2.4, torch 2.6 and 2.7 write 2.5 and 2.7, later ones 2.10.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from . import nccl_text

if TYPE_CHECKING:
    from .stream import Operation

_VERSION = "NCCL_LIKE_RECORDER"
_KEPT = 2000
_DTYPES = {
    "float32": "Float",
    "float64": "Double",
    "int64": "Long",
    "int32": "Int",
    "uint8": "Byte",
    "float16": "Half",
}


class Recorder:
    def __init__(self) -> None:
        self._entries: deque[tuple[Any, Operation, str, int]] = deque(maxlen=_KEPT)
        self._groups: list[Any] = []

    def install(self) -> None:
        import torch.distributed.distributed_c10d  # noqa: F401

        bindings: Any = sys.modules["torch._C._distributed_c10d"]
        bindings._dump_nccl_trace_json = lambda _collectives, _only_active: self.as_json()

    def clear(self) -> None:
        self._entries.clear()
        self._groups.clear()

    def add_group(self, group: Any) -> None:
        self._groups.append(group)

    def record(self, group: Any, operation: Operation) -> None:
        thread = threading.current_thread()
        self._entries.append((group, operation, thread.name, thread.native_id or 0))

    def as_json(self) -> bytes:
        return json.dumps(self._contents(lambda value: str(value))).encode()

    def as_pickle(self) -> bytes:
        return pickle.dumps(self._contents(lambda value: value), protocol=2)

    def write(self) -> str:
        """To the file that torch's settings name, if there is one. Return its path."""
        place = os.environ.get("TORCH_FR_DUMP_TEMP_FILE") or os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
        if not place:
            return "nowhere"
        path = f"{place}{os.environ.get('RANK', '0')}"
        with open(f"{path}.part", "wb") as file:
            file.write(self.as_pickle())
        os.replace(f"{path}.part", path)
        return path

    def _contents(self, number: Any) -> dict[str, Any]:
        version = os.environ.get(_VERSION, "2.10")
        minor = int(version.partition(".")[2])
        found: dict[str, Any] = {"version": version}
        if minor >= 10:
            found["comm_lib_version"] = nccl_text.VERSION
        elif minor >= 5:
            found["nccl_version"] = nccl_text.VERSION
        found["pg_config"] = {group.group_name: _config(group) for group in self._groups}
        found["pg_status"] = {str(at): _status(group, number) for at, group in enumerate(self._groups)}
        found["entries"] = [self._entry(minor, at, *each) for at, each in enumerate(list(self._entries))]
        return found

    def _entry(
        self, minor: int, at: int, group: Any, operation: Operation, thread: str, thread_id: int
    ) -> dict[str, Any]:
        name, desc = group._place()
        entry: dict[str, Any] = {
            "record_id": at,
            "pg_id": self._groups.index(group),
            "process_group": (name, desc),
            "collective_seq_id": operation.sequence,
            "p2p_seq_id": 0,
            "op_id": operation.sequence,
            "profiling_name": operation.name,
            "time_created_ns": operation.enqueued_ns,
            "input_sizes": [list(tensor.shape) for tensor in operation.inputs],
            "input_dtypes": [_dtype(tensor) for tensor in operation.inputs],
            "output_sizes": [list(tensor.shape) for tensor in operation.outputs],
            "output_dtypes": [_dtype(tensor) for tensor in operation.outputs],
            "state": "completed" if operation.done else "started" if operation.started else "scheduled",
            "time_discovered_started_ns": operation.enqueued_ns if operation.started else None,
            "time_discovered_completed_ns": operation.completed_ns or None,
            "retired": operation.done,
            "timeout_ms": int(operation.timeout_s * 1000),
            "is_p2p": False,
        }
        if minor >= 10:
            entry |= {"thread_name": thread, "thread_id": str(thread_id)}
        return entry


def _config(group: Any) -> dict[str, str]:
    from torch.distributed import get_process_group_ranks

    name, desc = group._place()
    ranks: list[int] = []
    with contextlib.suppress(KeyError):  # a group that has been destroyed stays in the recorder
        ranks = get_process_group_ranks(group)
    return {"name": name, "desc": desc, "ranks": str(ranks)}


def _status(group: Any, number: Any) -> dict[str, Any]:
    done = group._sequence - len(group._communicator.pending)
    names = ("last_enqueued_collective", "last_started_collective", "last_completed_collective")
    return dict(zip(names, map(number, (group._sequence, group._sequence, done)), strict=True))


def _dtype(tensor: Any) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    return _DTYPES.get(name, name)


RECORDER = Recorder()
