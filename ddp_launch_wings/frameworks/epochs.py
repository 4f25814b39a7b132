"""accelerate: its loop is the script's, so this gives the script its epochs, and each epoch its batches.

The state of the script is that of a finished step when it asks for the next batch.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddp.elastic import generators
from ddp.last_step import step_complete
from ddp.telemetry.coded import WrongUse
from ddp.telemetry.sections import status
from ddp.telemetry.values import log
from ddp_launch_wings.frameworks.resuming import (
    Generators,
    is_first,
    refuse_shards,
    register,
    saved_path,
    write_as_first,
)

_OURS = "ddp_launch.pt"


class _Batches:
    """Those of one epoch. A loop that is left drops its iterator, which notices it."""

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin: Callable[[], Iterator[Any]] | None = begin

    def __iter__(self) -> Iterator[Any]:
        begin, self._begin = self._begin, None
        if begin is None:
            raise WrongUse("these batches were looped over before. Take those of the next epoch")
        return begin()


class Epochs:
    """Where the training is: `epoch`, `batches` of this epoch, and `steps` of the optimizer."""

    def __init__(self, accelerator: Any, accelerate: Any, folder: str | os.PathLike[str] | None) -> None:
        if not accelerator._models:
            raise WrongUse("ddp.integrations.attach(accelerator) needs its models. Call it after prepare()")
        refuse_shards(accelerator)
        self._accelerator, self._skip_first = accelerator, accelerate.skip_first_batches
        self.epoch = self.batches = self.steps = 0
        self._call = self._resumed_call = 0  # of `over`
        self._epochs = self._epochs_before = self._steps_before = 0  # of this call, and of earlier ones
        self._left_for: int | None = None  # the loop was left: the epoch that would be next
        self._drawn, self._steps_in_all = 0, None
        self._has_stepped = False  # an optimizer, in a step that is not counted yet
        self._micro_step = accelerator.step
        self._at_epoch: dict[str, Any] | None = None
        self._in_epoch = Generators()
        self._resumed: dict[str, Any] | None = None
        self._is_kept = is_first()
        register_optimizer_step_post_hook(self._note_step)
        if not self._is_kept:
            return
        if path := saved_path():
            accelerator.load_state(path)
            self._resumed = torch.load(f"{path}/{_OURS}", weights_only=True)
            self.epoch, self.batches, self.steps = self._resumed["position"]
            self._resumed_call, self._epochs_before, self._steps_before = self._resumed["call"]
            accelerator.step = self._micro_step = self._resumed["step of accelerate"]
            for loader, shuffles in zip(accelerator._dataloaders, self._resumed["shuffles"], strict=False):
                if shuffles is not None:
                    loader.synchronized_generator.set_state(shuffles)
        register(self._save, folder or accelerator.project_dir or ".")
        self._follow_log()

    def over(self, loader: Any, epochs: int) -> Iterator[tuple[int, Iterable[Any]]]:
        """Each epoch with its number and its batches: `for epoch, batches in kept.over(loader, 10):`.

        Each call has epochs of its own, from 0. After a restart, calls and epochs that were finished yield nothing.
        """
        self._call += 1
        if self._call < self._resumed_call:
            return
        if self._call > max(1, self._resumed_call):
            self._epochs_before += self.epoch + 1
            self._steps_before, self.epoch = self.steps, 0
        self._epochs = epochs
        per_step = self._accelerator.gradient_accumulation_steps
        is_known = hasattr(loader, "__len__")
        self._steps_in_all = self._steps_before + epochs * -(-len(loader) // per_step) if is_known else None
        for epoch in range(self.epoch, epochs):
            if self._resumed is None:
                self._begin_epoch(epoch)
            try:
                yield epoch, _Batches(functools.partial(self._batches_of, loader))
            except GeneratorExit:
                self._left_for = epochs
                raise
            self._count_if_stepped()

    def step_complete(self) -> None:
        """Call this after the schedulers, before other communication: then a failure of that loses no step either."""
        if self._drawn > self.batches and self._accelerator.sync_gradients:
            self._count()

    def _begin_epoch(self, epoch: int) -> None:
        self.epoch, self.batches, self._drawn = epoch, 0, 0
        self._at_epoch = self._left_for = None

    def _note_step(self, optimizer: Any, *_: Any) -> None:
        self._has_stepped |= any(each.optimizer is optimizer for each in self._accelerator._optimizers)

    def _count(self) -> None:
        self._take_position()
        if self._is_kept:
            step_complete()
            status(f"epoch {self.epoch}", step=self.steps, total=self._steps_in_all)

    def _count_if_stepped(self) -> None:
        """The loop was left, anywhere in a batch."""
        if self._has_stepped:
            self._count()

    def _take_position(self) -> None:
        self._has_stepped = False
        self.batches, self.steps = self._drawn, self.steps + 1
        self._micro_step = self._accelerator.step
        self._in_epoch.forget()

    def _batches_of(self, loader: Any) -> Iterator[Any]:
        resumed, self._resumed = self._resumed, None
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(self._epochs_before + self.epoch)
        shuffles = getattr(loader, "synchronized_generator", None)
        if resumed is not None and resumed["at epoch"] is None:  # the failure came before the first batch
            generators.set(resumed["generators"])
            resumed = None
        at_failure = None
        if resumed is None:
            self._at_epoch = {"generators": generators.get(), "shuffles": _shuffles(loader)}
        else:
            began, at_failure = resumed["at epoch"], resumed["generators"]
            self._at_epoch = began
            generators.set(began["generators"])
            if shuffles is not None:
                shuffles.set_state(began["shuffles"])
            loader = self._skip_first(loader, self.batches)
        self._drawn = self.batches
        for batch in loader:
            self.step_complete()
            if at_failure is not None:
                generators.set(at_failure)
                at_failure = None
            if self._drawn == self.batches:  # else its gradients are added to those of earlier ones
                self._in_epoch.hold()
            self._drawn += 1
            try:
                yield batch
            except GeneratorExit:  # `break`, or an error
                self._count_if_stepped()
                self._left_for = self.epoch + 1
                raise
        if at_failure is not None:  # the failure came behind the last batch
            generators.set(at_failure)
        self.step_complete()

    def _save(self, path: Path) -> None:
        accelerator = self._accelerator
        accelerator.project_configuration.automatic_checkpoint_naming = False
        if self._has_stepped:
            if all(each.training for each in accelerator._models):
                raise RuntimeError("the failure came in a batch that has already made an optimizer step")
            self._take_position()  # in an evaluation after it
        if self._left_for is not None and not hasattr(sys, "last_value"):  # left by `break`, not by an error
            self._begin_epoch(self._left_for)
        is_at_first = self._at_epoch is not None and not self.batches and not self._in_epoch.is_held
        ours = {
            "position": (self.epoch, self.batches, self.steps),
            "call": (self._call, self._epochs_before, self._steps_before),
            "step of accelerate": self._micro_step,
            "generators": None if is_at_first else self._in_epoch.bring_back(),
            "at epoch": self._at_epoch,
            "shuffles": list(map(_shuffles, accelerator._dataloaders)),
        }
        world_size = accelerator.num_processes

        def save() -> None:
            accelerator.save_state(str(path))
            torch.save(ours, path / _OURS)

        write_as_first(accelerator, world_size, path, "random_states_{}.pkl", save)

    def _follow_log(self) -> None:
        given = self._accelerator.log

        def logged(values: Any, step: int | None = None, *args: Any, **kwargs: Any) -> None:
            log(values, step=step)
            given(values, step, *args, **kwargs)

        self._accelerator.log = logged


def _shuffles(loader: Any) -> torch.Tensor | None:
    """The state of the generator with which all ranks shuffle alike, if this loader has one."""
    made = getattr(loader, "synchronized_generator", None)
    return None if made is None else made.get_state()
