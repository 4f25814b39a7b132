"""`ddp.log`: numbers that the script measures, for people who watch the job. Nothing is sent anywhere.

They go into a ring of bytes behind the status page of this rank, which the launcher reads once a second. Only the
process that writes the page writes it: elsewhere, and without the launcher, a call does nothing. A call takes ten
microseconds, makes no system call, and never raises. If a script logs faster than the ring can hold for a second, the
oldest numbers of that second are lost.

What the script gives to TensorBoard, W&B or MLflow goes there, too: see the last section.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from .contracts import HEADER_BLOCK, RING_AT, STATUS_PAGE, VALUES_AT, VALUES_COUNTER, VALUES_END, VALUES_ROOM
from .observing import Observer
from .status_page import is_read, keep, kept

_MOST_NAMES, _MOST_CHARS = 32, 64
_LONGEST = VALUES_ROOM // 4


class _Ring:
    def __init__(self, memory: mmap.mmap | None) -> None:
        self._memory, self._pid, self._calls = memory, os.getpid(), 0
        self._written = 0 if memory is None else int.from_bytes(memory[VALUES_AT:RING_AT], "little")
        self._lock = threading.Lock()

    def put(self, values: Mapping[str, Any], step: int | None) -> None:
        """A call that interrupts another one, as a signal does, is left out."""
        if self._memory is None or os.getpid() != self._pid or not self._lock.acquire(blocking=False):
            return
        try:
            self._calls += 1
            found = {
                str(name)[:_MOST_CHARS]: each
                for name, value in list(values.items())[:_MOST_NAMES]
                if (each := _number(value)) is not None
            }
            record = json.dumps([self._calls if step is None else int(step), found], separators=(",", ":"))
            self._write(record.encode("ascii", "replace") + b"\n")
        finally:
            self._lock.release()

    def _write(self, record: bytes) -> None:
        assert self._memory is not None
        if len(record) > _LONGEST:
            return
        at = self._written % VALUES_ROOM
        head = record[: VALUES_ROOM - at]
        self._memory[RING_AT + at : RING_AT + at + len(head)] = head
        self._memory[RING_AT : RING_AT + len(record) - len(head)] = record[len(head) :]
        self._written += len(record)
        self._memory[VALUES_AT:RING_AT] = self._written.to_bytes(VALUES_COUNTER, "little")


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except Exception:  # of any class: a tensor with several numbers, a text
        return None


def log(values: Mapping[str, Any], step: int | None = None) -> None:
    """Show numbers on the page, in `ddpctl top` and in the metrics: `ddp.log({"loss": loss.item()}, step=step)`.

    `step`: what the chart is drawn over; without it, the number of the call. Any rank may call it, at any time, also
    without the launcher. A tensor on an accelerator is waited for, as by `.item()`. Values that are not numbers
    are left out.
    """
    with suppress(Exception):
        _ring().put(values, step)


def _ring() -> _Ring:
    ring: _Ring = kept("values") or keep("values", _Ring(_memory()))
    return ring


def _memory() -> mmap.mmap | None:
    if not is_read():
        return None
    file = os.open(os.environ[STATUS_PAGE], os.O_RDWR | os.O_CLOEXEC)
    try:
        pid = HEADER_BLOCK.packing.unpack(os.pread(file, HEADER_BLOCK.end, 0))[4]
        if pid != os.getpid() or os.fstat(file).st_size < VALUES_END:
            return None
        return mmap.mmap(file, VALUES_END)
    finally:
        os.close(file)


# --- what other writers are given ------------------------------------------------------------------
#
# The numbers that a script gives to torch's SummaryWriter, to W&B and to MLflow.
#
# Nothing is imported for it. After each step, this looks which of their modules the script has imported, and puts an
# observer around the method through which all numbers of that library pass. Each call looks that method up anew, which
# is not so for `wandb.log`. Of a number, it reads the value only if no code of others runs for it: Python's and NumPy's
# numbers, and those that TensorBoard has converted. A tensor that is given to W&B or MLflow is left out: reading it
# could wait for a GPU.

_Given = tuple[dict[str, Any], int | None]
_WRITERS = "writers"


def follow_writers() -> None:
    """Call this after each step: three look-ups until the script has imported a writer."""
    left: dict[str, _Follow] | None = kept(_WRITERS)
    if left is None:
        left = keep(_WRITERS, dict(_FOLLOWED))
    for name in [name for name in left if name in sys.modules]:
        if (found := vars(sys.modules[name]).get(left[name][0])) is not None:  # else its import runs
            for method, given in left.pop(name)[1].items():
                _observe(found, method, given)


def _observe(writer: type, method: str, given: Callable[..., _Given | None]) -> None:
    original = vars(writer).get(method)
    if not callable(original):
        return  # of another release

    def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = given(*args, **kwargs)
        if found is not None and found[0]:
            _ring().put(*found)

    observer = Observer("showing what TensorBoard, W&B or MLflow are given")
    setattr(writer, method, observer.around(original, before, lambda _state: None))


def _to_tensorboard(
    writer: Any = None, summary: Any = None, global_step: Any = None, *_: object, **_others: object
) -> _Given | None:
    if not type(summary).__module__.startswith("tensorboard."):
        return None
    return dict(_scalars(writer, summary)), _whole(global_step)


def _scalars(writer: Any, summary: Any) -> Iterator[tuple[str, float]]:
    for each in summary.value:
        kind, tag = each.WhichOneof("value"), each.tag
        of_many = os.path.basename(writer.get_logdir())  # `add_scalars` has a folder for each of its names
        name = of_many if of_many.startswith(f"{tag.replace('/', '_')}_") else tag
        if kind == "simple_value":
            yield name, each.simple_value
        elif kind == "tensor" and each.metadata.plugin_data.plugin_name == "scalars":
            numbers = each.tensor.float_val or each.tensor.double_val
            if len(numbers) == 1:
                yield name, numbers[0]


def _to_wandb(
    _run: Any = None, data: Any = None, step: Any = None, *_: object, **_others: object
) -> _Given | None:
    return (_numbers(data), _whole(step)) if isinstance(data, dict) else None


def _to_mlflow(
    _client: Any = None,
    _run: Any = None,
    key: Any = None,
    value: Any = None,
    _at: Any = None,
    step: Any = None,
    *_: object,
    **_others: object,
) -> _Given | None:
    return _numbers({key: value}), _whole(step) or None  # 0: none was given


def _batch_to_mlflow(
    _client: Any = None, _run: Any = None, metrics: Any = (), *_: object, **_others: object
) -> _Given | None:
    given = (
        [vars(each) for each in metrics if type(each).__name__ == "Metric"]
        if type(metrics) in (list, tuple)
        else []
    )
    found = _numbers({each.get("_key"): each.get("_value") for each in given})
    return (found, _whole(given[0].get("_step")) or None) if given else None


def _numbers(given: dict[Any, Any]) -> dict[str, Any]:
    return {name: each for name, each in dict.items(given) if type(name) is str and _is_plain(each, "biuf")}


def _is_plain(value: Any, kinds: str) -> bool:
    """Whether it is a number of Python or NumPy. `kinds`: as NumPy names them."""
    if type(value).__module__ == "numpy":
        return getattr(value, "ndim", 1) == 0 and value.dtype.kind in kinds
    return type(value) in (int, bool) or (type(value) is float and "f" in kinds)


def _whole(step: Any) -> int | None:
    return int(step) if _is_plain(step, "iu") else None


_Follow = tuple[str, dict[str, "Callable[..., _Given | None]"]]
_FOLLOWED: dict[str, _Follow] = {
    "torch.utils.tensorboard.writer": ("FileWriter", {"add_summary": _to_tensorboard}),
    "wandb.sdk.wandb_run": ("Run", {"_log": _to_wandb}),
    "mlflow.tracking.client": ("MlflowClient", {"log_metric": _to_mlflow, "log_batch": _batch_to_mlflow}),
}
