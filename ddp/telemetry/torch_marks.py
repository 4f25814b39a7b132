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
    guard,
    patience,
    profiling,
    status_page,
    step_profile,
    torch_api,
    torch_names,
)
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
    for mark in (*_MARKS, collective_marks.mark_group_creation):
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

    @functools.wraps(make)
    def make_group(*args: Any, **kwargs: Any) -> Any:
        guard.start()
        with guard.creating_group():
            return make(*args, **kwargs)

    return make_group


def _wake_guard() -> None:
    guard.start().wake()


def _explain(error: RuntimeError, op: str, sequence: int) -> None:
    """Raise a CommError if the script imports our library; otherwise add the cause to torch's error as a note."""
    doing = comm_words.Operation(op, sequence=sequence)
    ours = sys.modules.get("ddp.telemetry.comm_error")
    if ours is not None and is_in_this_folder(ours):
        ours.explain(error, doing)
    elif comm_words.is_communication_error(error):
        error.add_note(comm_words.explain_failure(error, doing, guard.start()).text)


def is_in_this_folder(module: Any) -> bool:
    """Whether a module is in the same folder as this one: a script may have another package of the same name."""
    path: str | None = getattr(module, "__file__", None)
    if path is None:
        return False
    return os.path.dirname(os.path.realpath(path)) == os.path.dirname(os.path.realpath(__file__))


def _mark_steps(page: Page) -> None:
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    is_compiling = torch.compiler.is_compiling

    def before_step(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not is_compiling():
            _refuse_garbage()
            profiling.at_step()
            page.mark(OPTIMIZER)

    def after_step(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not is_compiling():
            page.step()
            page.mark(IDLE)

    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)


def _refuse_garbage() -> None:
    """Raise if gradients may be garbage. A script that handles SIGTERM would use them, and save the result."""
    if reason := guard.why_broken():
        from torch.distributed import DistBackendError

        raise DistBackendError(f"{reason}. The gradients may be garbage, so the optimizer does not use them")


def _mark_modules(page: Page) -> None:
    """Mark the forward of torch's DistributedDataParallel, and of ours, which inherits from it."""
    torch_api.get(torch_names.POST_FORWARD)  # both or none: a phase that begins must end
    torch_api.patch(torch_names.PRE_FORWARD, partial(_marking_begin, page))
    torch_api.patch(torch_names.POST_FORWARD, partial(_marking_end, page))


def _marking_begin(page: Page, pre: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    is_compiling, is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
    waits = status_page.keep("torchs_reducer", _TorchsReducer(page))

    @functools.wraps(pre)
    def _pre_forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return pre(self, *inputs, **kwargs)
        has_gradients = is_grad_enabled()
        page.evaluates(not has_gradients)
        waits.forward(self, has_gradients)
        page.mark(FORWARD)
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
        self._begun = lambda _gradients: queue(awaits)
        self._class = getattr(distributed, "Reducer", None)  # its C++ reducer; ours tells the page itself
        self._tensor = Tensor  # a class that inherits from it may run code of the script
        self.is_due = False

    def forward(self, module: Any, has_gradients: bool) -> None:
        self.is_due = has_gradients and type(vars(module).get("reducer")) is self._class

    def backward(self, args: tuple[Any, ...]) -> None:
        """The hook is not removed, which would take as long as the rest: the graph of a step ends with it."""
        self.is_due = False
        root = args[0][0] if args and type(args[0]) is tuple and args[0] else None
        if type(root) is self._tensor and root.grad_fn is not None and not torch_api.is_autograd_compiled():
            root.grad_fn.register_prehook(self._begun)


def _marking_end(page: Page, post: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    is_compiling = torch.compiler.is_compiling

    @functools.wraps(post)
    def _post_forward(self: Any, output: Any) -> Any:
        output = post(self, output)
        if not is_compiling():
            page.mark(IDLE)
        return output

    return _post_forward


def _mark_backward(page: Page) -> None:
    """Wrap the autograd engine, not torch.autograd.backward and grad: torch.compile compares these two by identity."""

    def wrap(run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
            waits: _TorchsReducer | None = status_page.kept("torchs_reducer")
            before = page.mark(BACKWARD)
            if waits is not None and waits.is_due:
                waits.backward(args)
            try:
                return run(*args, **kwargs)
            finally:
                page.back(before)

        return _engine_run_backward

    torch_api.patch(torch_names.RUN_BACKWARD, wrap)


def _mark_loaders(page: Page) -> None:
    import torch

    is_grad_enabled = torch.is_grad_enabled

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __next__(self: Any) -> Any:
            page.evaluates(not is_grad_enabled())
            before = page.mark(DATA)
            try:
                return original(self)
            finally:
                page.back(before)

        return __next__

    torch_api.patch(torch_names.NEXT_BATCH, wrap)


def _mark_saving(page: Page) -> None:
    import torch
    import torch.serialization

    save: Callable[..., Any] = torch.save

    @functools.wraps(save)
    def saving(*args: Any, **kwargs: Any) -> Any:
        before = page.phase(CHECKPOINT)
        try:
            return save(*args, **kwargs)
        finally:
            page.phase(before)

    torch.save = torch.serialization.save = saving


def _mark_replays(page: Page) -> None:
    """Mark replays of graphs: a replayed step runs no other function that is marked, and would look like a hang."""
    import torch

    owners = [(torch.accelerator, "Graph")]
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:  # CUDAGraph, XPUGraph
        owners.append((torch.get_device_module(accelerator), f"{accelerator.type.upper()}Graph"))
    for module, name in owners:
        graph_class: Any = getattr(module, name, None)
        original = getattr(graph_class, "replay", None)
        if callable(original):
            graph_class.replay = _marking_replay(page, original)


def _marking_replay(page: Page, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replay(self: Any) -> Any:
        before = page.mark(BACKWARD)
        try:
            return original(self)
        finally:
            page.back(before)

    return replay


_MARKS = (_mark_steps, _mark_modules, _mark_backward, _mark_loaders, _mark_saving, _mark_replays)
