"""Marks on torch's own functions, so that the page of any script tells what it does: phases and steps.

Nothing that a script can name looks different afterwards. The functions that torch.compile may look into do nothing
while it does. Collectives have a module of their own, `ddp/telemetry/collective_marks.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
from typing import TYPE_CHECKING, Any

from . import collective_marks, comm_words, ending, guard, status_page
from .status_page import BACKWARD, CHECKPOINT, DATA, EXITING, FORWARD, IDLE, OPTIMIZER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
    if ours is not None and is_beside_us(ours):
        ours.explain(error, doing)
    elif comm_words.is_of_communication(error):
        error.add_note(comm_words.explanation(error, doing, guard.start()).text)


def is_beside_us(module: Any) -> bool:
    """In the folder of this module: a script may have a package of another origin under the same name."""
    path: str | None = getattr(module, "__file__", None)
    if path is None:
        return False
    return os.path.dirname(os.path.realpath(path)) == os.path.dirname(os.path.realpath(__file__))


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
    _mark_failed_steps(page)


def _mark_failed_steps(page: Page) -> None:
    """torch calls no hook after a step that raised: look inside its wrapper around each optimizer's `step`."""
    import torch

    is_compiling = torch.compiler.is_compiling
    optimizer: Any = torch.optim.Optimizer
    wrap_step = optimizer.profile_hook_step

    @functools.wraps(wrap_step)
    def profile_hook_step(step: Callable[..., Any]) -> Any:
        @functools.wraps(step)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return step(*args, **kwargs)
            try:
                return step(*args, **kwargs)
            except BaseException:
                page.mark(IDLE)
                raise

        return wrap_step(guarded)

    optimizer.profile_hook_step = staticmethod(profile_hook_step)


def _mark_modules(page: Page) -> None:
    """torch's DistributedDataParallel, and ours, which is built on it."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    is_compiling = torch.compiler.is_compiling
    wrapper: Any = DistributedDataParallel
    pre, inside, post = wrapper._pre_forward, wrapper._inside_ddp_forward, wrapper._post_forward

    # torch.compile gives up on a frame that handles exceptions, so the handler has a frame of its own.
    def begin(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        try:
            return pre(self, *inputs, **kwargs)
        except BaseException:
            page.mark(IDLE)
            raise

    @functools.wraps(pre)
    def _pre_forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return pre(self, *inputs, **kwargs)
        page.mark(FORWARD)
        return begin(self, *inputs, **kwargs)

    # torch keeps its own out of torch.compile in the same way.
    @contextlib.contextmanager
    @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]
    def _inside_ddp_forward(self: Any) -> Iterator[None]:
        with inside(self):
            try:
                yield
            except BaseException:
                page.mark(IDLE)
                raise

    @functools.wraps(post)
    def _post_forward(self: Any, output: Any) -> Any:
        output = post(self, output)
        if not is_compiling():
            page.mark(IDLE)
        return output

    wrapper._pre_forward, wrapper._post_forward = _pre_forward, _post_forward
    wrapper._inside_ddp_forward = functools.wraps(inside)(_inside_ddp_forward)


def _mark_backward(page: Page) -> None:
    """Below torch.autograd.backward and grad, which torch.compile knows by their identity."""
    import torch

    autograd: Any = torch.autograd
    run = autograd._engine_run_backward

    @functools.wraps(run)
    def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
        before = page.mark(BACKWARD)
        try:
            return run(*args, **kwargs)
        finally:
            page.back(before)

    autograd._engine_run_backward = _engine_run_backward


def _mark_loaders(page: Page) -> None:
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    following = _BaseDataLoaderIter.__next__

    @functools.wraps(following)
    def __next__(self: Any) -> Any:
        before = page.mark(DATA)
        try:
            return following(self)
        finally:
            page.back(before)

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
            page.phase(before)

    torch.save = torch.serialization.save = saving


_MARKS = (_mark_steps, _mark_modules, _mark_backward, _mark_loaders, _mark_saving)
