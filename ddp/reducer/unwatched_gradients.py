"""Gradients of a backward past the wrapper that no hook reports.

With sentinels, most parameters have no hook. The round of a forward finds their gradients by comparison. A backward
whose forward did not run through the wrapper has no round, and may reach only parameters without a hook, for example
those of the last layer. So each backward that begins while a reducer with sentinels has no round is compared from
outside: did `.grad` change, and did no round average it? Then it is averaged, and every parameter gets a hook for good.

An ordinary step has a round when its backward begins, so nothing is compared.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

from ddp.reducer import errors, lenient
from ddp.reducer.baseline import baseline
from ddp.reducer.chunks import Mode
from ddp.telemetry import status_page, torch_api, torch_names

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddp.reducer.baseline import Baseline
    from ddp.reducer.reducer import Reducer

_reducers: weakref.WeakSet[Reducer] = weakref.WeakSet()


def watch(reducer: Reducer) -> None:
    """Compare the backwards of this process from outside while the reducer has no round."""
    _reducers.add(reducer)
    if status_page.once("unwatched_gradients"):
        torch_api.patch(torch_names.RUN_BACKWARD, _comparing)


class _Suspect:
    """A reducer that has no round when a backward begins."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self._before: Baseline = baseline(reducer.parameters, exact=True)
        self._last = (reducer.previous, reducer.stray_task)

    def check(self) -> None:
        reducer = self._reducer
        if self._last != (reducer.previous, reducer.stray_task) or reducer.mode is not Mode.SENTINEL:
            return  # a round has averaged, or a hook has reported it
        arrived = [i for i, p in enumerate(reducer.parameters) if self._before.arrived(i, p.grad)]
        if not arrived:
            return
        average = lenient.past_forward(reducer)
        if average is None:
            raise errors.outside(reducer.setup.names_of(arrived), reducer.rank)
        reducer.watch_every_parameter()
        average()


def _comparing(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("accumulate_grad", True):  # torch.autograd.grad
            return run(*args, **kwargs)
        suspects = [_Suspect(each) for each in tuple(_reducers) if _is_suspect(each)]
        result = run(*args, **kwargs)
        for suspect in suspects:
            suspect.check()
        return result

    return _engine_run_backward


def _is_suspect(reducer: Reducer) -> bool:
    averages = reducer.synchronizes and reducer.wanted()
    return reducer.round is None and reducer.mode is Mode.SENTINEL and averages
