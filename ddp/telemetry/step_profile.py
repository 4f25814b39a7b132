"""Records some training steps of this rank for `ddp-launch plan`, and then ends the rank.

For each step it records when the gradient of each parameter was ready, and how long the rank computed. The time between
the last gradient and the end of the backward is communication, and is not counted. The parameters are those of the
script's optimizers, so the model need not be wrapped. On an accelerator, moments are events in the stream, which are
read after the last step.

If several ranks run, they also measure all-reduces of some sizes. All ranks have made the same number of steps then.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from . import torch_api, torch_names
from .observing import Observer

if TYPE_CHECKING:
    from collections.abc import Callable

PATH, STEPS = "DDP_STEP_PROFILE", "DDP_STEP_PROFILE_STEPS"
WARM_UP = 5
_FEWEST = 3
_SIZES = tuple(1 << exponent for exponent in (2, 16, 20, 22, 24, 26))
_REPEATS = 5


def install() -> None:
    """Record if the launcher asks for it. torch must be imported before."""
    path = os.environ.get(PATH)
    if path:
        _Recorder(path, int(os.environ.get(STEPS, "20"))).install()


class _Recorder:
    def __init__(self, path: str, steps: int) -> None:
        self._path, self._wanted = path, steps
        self._known: dict[int, int] = {}  # id of a parameter -> its place in the lists
        self._sizes: list[int] = []
        self._now: Callable[[], Any] = time.perf_counter
        self._device = "cpu"
        self._first: Any = None  # the optimizer whose steps are counted
        self._count = 0
        self._began: Any = None
        self._ended: Any = None
        self._stepped: Any = None
        self._at: list[Any] = []
        self._steps: list[tuple[Any, ...]] = []

    def install(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        observer = Observer("the profile of steps")
        register_optimizer_step_pre_hook(observer.guarded(self._before_step))
        register_optimizer_step_post_hook(observer.guarded(self._after_step))
        torch_api.patch(torch_names.RUN_BACKWARD, lambda run: observer.around(run, self._begin, self._end))
        atexit.register(observer.guarded(self._write))

    def _begin(self, _args: Any, _kwargs: Any) -> bool:
        self._began = self._now()
        self._at = [None] * len(self._sizes)
        return True

    def _end(self, _began: bool) -> None:
        self._ended = self._now()

    def _before_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._first = self._first or optimizer
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and id(parameter) not in self._known:
                    self._follow(parameter)

    def _follow(self, parameter: Any) -> None:
        if hasattr(parameter, "device_mesh"):
            self._fail("its parameters are sharded (DTensor). Profile the model without fully_shard")
        place = self._known[id(parameter)] = len(self._sizes)
        self._sizes.append(parameter.numel() * parameter.element_size())
        if parameter.device.type != "cpu" and self._device == "cpu":
            self._device, self._now = parameter.device.type, _device_clock(parameter.device)

        def arrived(_gradient: Any) -> None:
            if place < len(self._at):
                self._at[place] = self._now()

        parameter.register_hook(arrived)

    def _after_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if optimizer is not self._first:
            return
        before, self._stepped = self._stepped, self._now()
        self._count += 1
        if self._count > WARM_UP and self._began is not None:
            self._steps.append((before, self._began, self._at, self._ended, self._stepped))
        if len(self._steps) == self._wanted:
            self._write()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def _write(self) -> None:
        if len(self._steps) < _FEWEST or not self._sizes:
            return
        record = {
            "device": self._device,
            "gradients": self._gradients(),
            "steps": [self._computing(step) for step in self._steps],
            "inside": self._measured_inside() if len(self._steps) == self._wanted else [],
        }
        self._leave(record)
        self._steps = []

    def _gradients(self) -> list[tuple[int, float]]:
        """Bytes and the median arrival of each gradient that arrives in every step."""
        found = []
        for place, nbytes in enumerate(self._sizes):
            moments = [(began, at[place]) for _, began, at, _, _ in self._steps if place < len(at)]
            arrivals = sorted(_between(began, at) for began, at in moments if at is not None)
            if arrivals:
                found.append((nbytes, arrivals[len(arrivals) // 2]))
        return found

    def _computing(self, step: tuple[Any, ...]) -> float:
        before, began, at, ended, stepped = step
        last = max((_between(began, moment) for moment in at if moment is not None), default=0.0)
        return _between(before, stepped) - max(0.0, _between(began, ended) - last)

    def _measured_inside(self) -> list[tuple[int, float]]:
        import torch
        from torch import distributed

        if not distributed.is_available() or not distributed.is_initialized():
            return []
        if distributed.get_world_size() == 1:
            return []
        return [(nbytes, self._all_reduce(torch, distributed, nbytes)) for nbytes in _SIZES]

    def _all_reduce(self, torch: Any, distributed: Any, nbytes: int) -> float:
        tensor = torch.zeros(nbytes // 4, device=self._device)
        taken = []
        for _ in range(_REPEATS + 1):
            distributed.barrier()
            began = self._now()
            distributed.all_reduce(tensor)
            taken.append((began, self._now()))
        return sorted(_between(*each) for each in taken[1:])[_REPEATS // 2]

    def _leave(self, record: dict[str, Any]) -> None:
        path = f"{self._path}.{os.environ.get('RANK', '0')}"
        with open(f"{path}.part", "w") as file:
            json.dump(record, file)
        os.replace(f"{path}.part", path)

    def _fail(self, reason: str) -> None:
        self._leave({"problem": reason})
        os._exit(1)


def _device_clock(device: Any) -> Callable[[], Any]:
    import torch

    def now() -> Any:
        event = torch.Event(device=device, enable_timing=True)
        event.record()
        return event

    return now


def _between(began: Any, ended: Any) -> float:
    if isinstance(began, float):
        return float(ended - began)
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3
