"""Marks on torch's own functions, so that the page of any script tells what it does: phases and steps.

Nothing that a script can name looks different afterwards. The functions that torch.compile may look into do nothing
while it does. Collectives have a module of their own, `ddp/telemetry/collective_marks.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any

from . import collective_marks, comm_words, ending, guard, status_page
from .status_page import BACKWARD, CHECKPOINT, DATA, EXITING, FORWARD, IDLE, OPTIMIZER

if TYPE_CHECKING:
    from collections.abc import Callable

    from .status_page import Page


def install() -> None:
    """Once in a process whose page is read; torch is imported by then."""
    ending.arrange()
    if not status_page.is_read() or not status_page.once("marks"):
        return
    page = status_page.page()
    atexit.register(page.phase, EXITING)
    for mark in (*_MARKS, collective_marks.note_forming):
        with contextlib.suppress(ImportError, AttributeError):  # a torch that does it in another way
            mark(page)
    if status_page.traces_collectives():
        collective_marks.install(page)
        collective_marks.when_a_group_is_made(_guard)
        collective_marks.when_one_fails(_explain)


def _guard() -> None:
    guard.start().wake()


def _explain(error: RuntimeError, op: str, sequence: int) -> None:
    """A script that knows our library gets our error; any other gets torch's, with a note of who is gone."""
    doing = comm_words.Doing(op, sequence=sequence)
    ours = sys.modules.get("ddp.telemetry.comm_error")
    if ours is not None and getattr(ours, "__file__", None) == comm_words.__file__.replace("words", "error"):
        ours.explain(error, doing)
    elif comm_words.is_of_communication(error):
        error.add_note(comm_words.explanation(error, doing, guard.start()).text)


def _mark_steps(page: Page) -> None:
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    is_compiling = torch.compiler.is_compiling

    def begins(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not is_compiling():
            page.mark(OPTIMIZER)

    def is_over(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not is_compiling():
            page.step()
            page.mark(IDLE)

    register_optimizer_step_pre_hook(begins)
    register_optimizer_step_post_hook(is_over)


def _mark_modules(page: Page) -> None:
    """torch's DistributedDataParallel, and ours, which is built on it."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    is_compiling = torch.compiler.is_compiling
    wrapper: Any = DistributedDataParallel
    pre, post = wrapper._pre_forward, wrapper._post_forward

    @functools.wraps(pre)
    def _pre_forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if not is_compiling():
            page.mark(FORWARD)
        return pre(self, *inputs, **kwargs)

    @functools.wraps(post)
    def _post_forward(self: Any, output: Any) -> Any:
        output = post(self, output)
        if not is_compiling():
            page.mark(IDLE)
        return output

    wrapper._pre_forward, wrapper._post_forward = _pre_forward, _post_forward


def _mark_backward(page: Page) -> None:
    """Below torch.autograd.backward and grad, which torch.compile knows by their identity."""
    import torch

    autograd: Any = torch.autograd
    run = autograd._engine_run_backward

    @functools.wraps(run)
    def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
        before = page.mark(BACKWARD)
        result = run(*args, **kwargs)
        page.back(before)
        return result

    autograd._engine_run_backward = _engine_run_backward


def _mark_loaders(page: Page) -> None:
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    following = _BaseDataLoaderIter.__next__

    @functools.wraps(following)
    def __next__(self: Any) -> Any:
        before = page.mark(DATA)
        try:
            batch = following(self)
        except StopIteration:
            page.back(before)
            raise
        page.back(before)
        return batch

    _BaseDataLoaderIter.__next__ = __next__  # type: ignore[method-assign]


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
            page.phase(before)  # a script that goes on after an error is in no checkpoint any more

    torch.save = torch.serialization.save = saving


_MARKS = (_mark_steps, _mark_modules, _mark_backward, _mark_loaders, _mark_saving)
