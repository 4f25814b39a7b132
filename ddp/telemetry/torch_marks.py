"""Wrappers of torch's functions: the status page shows the phases and steps of any script, without changes to it.

A wrapped function looks the same to a script. Functions that torch.compile may trace do nothing while it traces them.
Collectives have their own module, `ddp/telemetry/collective_marks.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from . import (
    collective_marks,
    comm_words,
    ending,
    group_marks,
    guard,
    patience,
    profiling,
    status_page,
    step_profile,
    torch_api,
    torch_names,
)
from .observing import Observer
from .status_page import BACKWARD, CHECKPOINT, DATA, EXITING, FORWARD, IDLE, OPTIMIZER

if TYPE_CHECKING:
    from collections.abc import Callable

    from .status_page import Page


def install() -> None:
    """Install the wrappers once per process, if its page is read. torch must be imported before."""
    torch_api.warn_once()
    ending.install()
    patience.install()
    if not status_page.is_read() or not status_page.once("marks"):
        return
    page = status_page.page()
    atexit.register(page.phase, EXITING)
    for mark in (*_MARKS, group_marks.mark_group_creation):
        with contextlib.suppress(ImportError, AttributeError):  # the warning says what this torch lacks
            mark(page)
    step_profile.install()
    if status_page.traces_collectives():
        torch_api.switch_recorder_on()
        collective_marks.install(page)
        with contextlib.suppress(AttributeError):  # the same
            torch_api.patch(torch_names.NEW_GROUP, _with_guard)
        collective_marks.on_new_group(_wake_guard)
        collective_marks.on_failure(_explain)


def _with_guard(make: Callable[..., Any]) -> Callable[..., Any]:
    """It looks which sockets are Gloo's."""

    def before(_args: Any, _kwargs: Any) -> contextlib.AbstractContextManager[None]:
        guard.start()
        creating = guard.creating_group()
        creating.__enter__()
        return creating

    def after(creating: contextlib.AbstractContextManager[None]) -> None:
        creating.__exit__(None, None, None)

    return Observer("the search for lost peers").around(make, before, after)


def _wake_guard() -> None:
    guard.start().wake()


def _explain(error: RuntimeError, op: str, sequence: int) -> Exception | None:
    """Return a CommError if the script imports our library; otherwise add the cause to torch's error as a note."""
    doing = comm_words.Operation(op, sequence=sequence)
    ours = sys.modules.get("ddp.telemetry.comm_error")
    if ours is not None and is_in_this_folder(ours):
        try:
            ours.explain(error, doing)
        except ours.CommError as explained:
            return explained  # type: ignore[no-any-return]
    elif comm_words.is_communication_error(error):
        error.add_note(comm_words.explain_failure(error, doing, guard.start()).text)
    return None


def is_in_this_folder(module: Any) -> bool:
    """Whether a module is in the same folder as this one: a script may have another package of the same name."""
    path: str | None = getattr(module, "__file__", None)
    if path is None:
        return False
    return os.path.dirname(os.path.realpath(path)) == os.path.dirname(os.path.realpath(__file__))


def _mark_steps(page: Page) -> None:
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    is_compiling, observer = torch.compiler.is_compiling, Observer("the record of steps")

    def begin() -> str:
        profiling.at_step()
        page.mark(OPTIMIZER)
        return guard.why_broken()

    def end() -> None:
        page.step()
        page.mark(IDLE)

    def before_step(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not is_compiling() and (reason := observer.run(begin)):
            _refuse_garbage(reason)

    def after_step(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not is_compiling():
            observer.run(end)

    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)


def _refuse_garbage(reason: str) -> None:
    """Raise if gradients may be garbage. A script that handles SIGTERM would use them, and save the result."""
    from torch.distributed import DistBackendError

    raise DistBackendError(f"{reason}. The gradients may be garbage, so the optimizer does not use them")


def _mark_modules(page: Page) -> None:
    """Mark the forward of torch's DistributedDataParallel, and of ours, which inherits from it."""
    torch_api.get(torch_names.POST_FORWARD)  # both or none: a phase that begins must end
    observer = Observer("the record of forward passes")
    torch_api.patch(torch_names.PRE_FORWARD, partial(_marking_begin, page, observer))
    torch_api.patch(torch_names.POST_FORWARD, partial(_marking_end, page, observer))


def _marking_begin(page: Page, observer: Observer, pre: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    is_compiling, is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
    waits = status_page.keep("torchs_reducer", _TorchsReducer(page))

    def begin(module: Any) -> None:
        has_gradients = is_grad_enabled()
        page.evaluates(not has_gradients)
        waits.forward(module, has_gradients)
        page.mark(FORWARD)

    @functools.wraps(pre)
    def _pre_forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if not is_compiling():
            observer.run(begin, self)
        return pre(self, *inputs, **kwargs)

    return _pre_forward


class _TorchsReducer:
    """Tells the page when a backward pass of torch's DDP only waits for its buckets.

    torch's reducer waits in C++, in a callback at the end of the backward pass that it queues when the last bucket is
    launched. A callback that is queued before it, when the backward pass begins, runs just before it: all gradients
    are computed. On a GPU the reducer waits on the device, and the host sees nothing of it.
    """

    def __init__(self, page: Page) -> None:
        from torch import Tensor, distributed

        queue, awaits = torch_api.get(torch_names.ENGINE).queue_callback, page.awaits
        self._begun = Observer("the time that torch's DDP waits").guarded(lambda _gradients: queue(awaits))
        self._without_overrides = torch_api.get(torch_names.WITHOUT_OVERRIDES)
        self._class = getattr(distributed, "Reducer", None)  # its C++ reducer; ours tells the page itself
        self._tensor = Tensor  # a class that inherits from it may run code of the script
        self.is_due = False

    def forward(self, module: Any, has_gradients: bool) -> None:
        self.is_due = has_gradients and type(vars(module).get("reducer")) is self._class

    def backward(self, args: tuple[Any, ...]) -> None:
        """The hook is not removed, which would take as long as the rest: the graph of a step ends with it."""
        self.is_due = False
        root = args[0][0] if args and type(args[0]) is tuple and args[0] else None
        if type(root) is self._tensor and not torch_api.is_autograd_compiled():
            with self._without_overrides():
                if root.grad_fn is not None:
                    root.grad_fn.register_prehook(self._begun)


def _marking_end(page: Page, observer: Observer, post: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    is_compiling = torch.compiler.is_compiling

    @functools.wraps(post)
    def _post_forward(self: Any, output: Any) -> Any:
        output = post(self, output)
        if not is_compiling():
            observer.run(page.mark, IDLE)
        return output

    return _post_forward


def _mark_backward(page: Page) -> None:
    """Wrap the autograd engine, not torch.autograd.backward and grad: torch.compile compares these two by identity."""

    def before(args: tuple[Any, ...], _kwargs: Any) -> int:
        waits: _TorchsReducer | None = status_page.kept("torchs_reducer")
        if waits is not None and waits.is_due:
            waits.backward(args)
        return page.mark(BACKWARD)

    def wrap(run: Callable[..., Any]) -> Callable[..., Any]:
        return Observer("the record of backward passes").around(run, before, page.back)

    torch_api.patch(torch_names.RUN_BACKWARD, wrap)


def _mark_loaders(page: Page) -> None:
    import torch

    is_grad_enabled = torch.is_grad_enabled

    def before(_args: Any, _kwargs: Any) -> int:
        page.evaluates(not is_grad_enabled())
        return page.mark(DATA)

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        return Observer("the record of data loaders").around(original, before, page.back)

    torch_api.patch(torch_names.NEXT_BATCH, wrap)


def _mark_saving(page: Page) -> None:
    import torch
    import torch.serialization

    observer = Observer("the record of checkpoints")
    saving = observer.around(torch.save, lambda _args, _kwargs: page.phase(CHECKPOINT), page.phase)
    torch.save = torch.serialization.save = saving


def _mark_replays(page: Page) -> None:
    """Mark replays of graphs: a replayed step runs no other function that is marked, and would look like a hang."""
    import torch

    observer = Observer("the record of replayed graphs")
    owners = [(torch.accelerator, "Graph")]
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:  # CUDAGraph, XPUGraph
        owners.append((torch.get_device_module(accelerator), f"{accelerator.type.upper()}Graph"))
    for module, name in owners:
        graph_class: Any = getattr(module, name, None)
        original = getattr(graph_class, "replay", None)
        if callable(original):
            graph_class.replay = observer.around(
                original, lambda _args, _kwargs: page.mark(BACKWARD), page.back
            )


_MARKS = (_mark_steps, _mark_modules, _mark_backward, _mark_loaders, _mark_saving, _mark_replays)
