"""The result of `_get_ddp_logging_data`. It has only the keys of torch that this reducer can fill."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddp.reducer.device import clock_of

if TYPE_CHECKING:
    import torch

_ENVIRONMENT = ("MASTER_PORT", "MASTER_ADDR", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES")
_OF_BACKEND = {
    "gloo": ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"),
    "nccl": ("NCCL_SOCKET_IFNAME", "NCCL_BLOCKING_WAIT", "NCCL_DEBUG", "NCCL_NTHREADS", "NCCL_IB_TIMEOUT"),
}
_STAGES = ("forward_compute", "backward_compute", "backward_comm", "backward_compute_comm_overlap")
_ALWAYS_SAMPLED = 10


@dataclass
class Data:
    """The same fields as torch's DDPLoggingData."""

    strs_map: dict[str, str] = field(default_factory=dict)
    ints_map: dict[str, int] = field(default_factory=dict)


class Stopwatch:
    """Start and end times of the stages of a step, in nanoseconds. It times the first ten steps, then every n-th.

    On an accelerator these are times of the device. They are read when the device has passed them, so they may be those
    of an earlier step.
    """

    def __init__(self, device: torch.device) -> None:
        self.sample_rate = 100
        self.iteration = 0
        self.sums = dict.fromkeys(_STAGES, 0)
        self.samples = 0
        self.times: dict[str, int] = {}  # of the last step whose times are known
        self._clock = clock_of(device, time.time_ns)
        self._marks: dict[str, Any] = {}
        self._unread: deque[dict[str, Any]] = deque(maxlen=_ALWAYS_SAMPLED)

    def next_iteration(self) -> None:
        self.iteration += 1
        self._marks = {}

    @property
    def sampling(self) -> bool:
        return self.iteration <= _ALWAYS_SAMPLED or self.iteration % self.sample_rate == 0

    def mark(self, name: str) -> None:
        if self.sampling and self._clock.runs:
            self._marks[name] = self._clock.now()

    def mark_first(self, name: str) -> None:
        if name not in self._marks:
            self.mark(name)

    def step_ended(self) -> None:
        self.mark("comm_end")
        if "comm_end" in self._marks:
            self._unread.append(dict(self._marks))

    def read(self) -> None:
        """Read the times of the steps that the device has passed. Does not wait."""
        clock = self._clock
        while clock.runs and self._unread and clock.has_passed(self._unread[0]["comm_end"]):
            marks = self._unread.popleft()
            self.times = {name: clock.nanoseconds(moment) for name, moment in marks.items()}
            clock.measure_from(marks["comm_end"])
            if spans := self.spans():
                self.samples += 1
                for stage, span in spans.items():
                    self.sums[stage] += span

    def spans(self) -> dict[str, int]:
        at = self.times
        wanted = ("forward_start", "backward_start", "comm_start", "compute_end", "comm_end")
        if any(name not in at for name in wanted):
            return {}
        overlap = max(0, min(at["compute_end"], at["comm_end"]) - at["comm_start"])
        return {
            "forward_compute": at["backward_start"] - at["forward_start"],
            "backward_compute": at["compute_end"] - at["backward_start"],
            "backward_comm": at["comm_end"] - at["comm_start"],
            "backward_compute_comm_overlap": overlap,
        }


class ReducerLogger:
    """A replacement for torch's Logger."""

    def __init__(self, refresh: Callable[[ReducerLogger], None]) -> None:
        self.data = Data()
        self._refresh = refresh

    def set_construction_data_and_log(
        self,
        module_name: str,
        device_ids: Sequence[int],
        output_device: int,
        broadcast_buffers: bool,
        has_sync_bn: bool,
        static_graph: bool,
    ) -> None:
        strings, numbers = self.data.strs_map, self.data.ints_map
        strings["module_name"] = module_name
        strings["device_ids"] = ", ".join(map(str, device_ids))
        variables = (*_ENVIRONMENT, *_OF_BACKEND.get(strings.get("backend_name", ""), ()))
        strings.update({name.lower(): os.environ.get(name, "N/A") for name in variables})
        numbers["output_device"] = output_device
        numbers["broadcast_buffers"] = int(broadcast_buffers)
        numbers["has_sync_bn"] = int(has_sync_bn)
        if static_graph:
            numbers["static_graph"] = 1

    def update(self, strings: dict[str, str], numbers: dict[str, int]) -> None:
        self.data.strs_map.update(strings)
        self.data.ints_map.update(numbers)

    def update_times(self, watch: Stopwatch) -> None:
        numbers = self.data.ints_map
        watch.read()
        for stage, span in watch.spans().items():
            numbers[f"{stage}_time"] = span
            numbers[f"avg_{stage}_time"] = watch.sums[stage] // max(1, watch.samples)
        starts = {
            "forward_compute_time_start": "forward_start",
            "backward_compute_time_start": "backward_start",
            "backward_compute_time_end": "compute_end",
            "backward_comm_time_start": "comm_start",
            "backward_comm_time_end": "comm_end",
        }
        numbers.update({key: watch.times[name] for key, name in starts.items() if name in watch.times})

    def set_runtime_stats_and_log(self) -> None:
        """Refresh the data before a forward, from the steps before it."""
        self._refresh(self)

    def set_error_and_log(self, error: str) -> None:
        self.data.strs_map["error"] = error
        self.data.ints_map["has_error"] = 1

    def _set_comm_hook_name(self, name: str) -> None:
        self.data.strs_map["comm_hook"] = name

    def _set_uneven_input_join(self) -> None:
        self.data.ints_map["join_uneven_inputs"] = 1

    def _set_static_graph(self) -> None:
        self.data.ints_map["static_graph"] = 1

    def _get_ddp_logging_data(self) -> Data:
        return self.data
