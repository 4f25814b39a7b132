"""accelerate: its loop is the script's, so this gives the script its epochs, and each epoch its batches.

The state of the script is that of a finished step when it asks for the next batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

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

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator
    from pathlib import Path

_OURS = "ddp_launch.pt"


class Epochs:
    """Where the training is: `epoch`, `batches` of this epoch, and `steps` of the optimizer."""

    def __init__(self, accelerator: Any, accelerate: Any, folder: str | os.PathLike[str] | None) -> None:
        if not accelerator._models:
            raise WrongUse("ddp.integrations.attach(accelerator) needs its models. Call it after prepare()")
        refuse_shards(accelerator)
        self._accelerator, self._skip_first = accelerator, accelerate.skip_first_batches
        self.epoch = self.batches = self.steps = 0
        self._drawn, self._steps_in_all = 0, None
        self._micro_step = accelerator.step
        self._at_epoch: dict[str, Any] | None = None
        self._in_epoch = Generators()
        self._resumed: dict[str, Any] | None = None
        self._is_kept = is_first()
        if not self._is_kept:
            return
        if path := saved_path():
            accelerator.load_state(path)
            self._resumed = torch.load(f"{path}/{_OURS}", weights_only=True)
            self.epoch, self.batches, self.steps = self._resumed["position"]
            accelerator.step = self._micro_step = self._resumed["step of accelerate"]
        register(self._save, folder or accelerator.project_dir or ".")
        self._follow_log()

    def over(self, loader: Any, epochs: int) -> Iterator[tuple[int, Iterator[Any]]]:
        """Each epoch with its number and its batches: `for epoch, batches in kept.over(loader, 10):`."""
        per_step = self._accelerator.gradient_accumulation_steps
        self._steps_in_all = epochs * -(-len(loader) // per_step) if hasattr(loader, "__len__") else None
        for epoch in range(self.epoch, epochs):
            if self._resumed is None:
                self.epoch, self.batches, self._at_epoch = epoch, 0, None
            yield epoch, self._batches_of(loader)

    def step_complete(self) -> None:
        """Call this after the schedulers, before other communication: then a failure of that loses no step either."""
        if self._drawn > self.batches and self._accelerator.sync_gradients:
            self.batches, self.steps = self._drawn, self.steps + 1
            self._micro_step = self._accelerator.step
            self._in_epoch.forget()
            if self._is_kept:
                step_complete()
                status(f"epoch {self.epoch}", step=self.steps, total=self._steps_in_all)

    def _batches_of(self, loader: Any) -> Iterator[Any]:
        resumed, self._resumed = self._resumed, None
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(self.epoch)
        synchronized = getattr(loader, "synchronized_generator", None)
        if resumed is not None and resumed["at epoch"] is None:  # the failure came before the first batch
            generators.set(resumed["generators"])
            resumed = None
        if resumed is None:
            own = None if synchronized is None else synchronized.get_state()
            self._at_epoch = {"generators": generators.get(), "synchronized": own}
        else:
            began = self._at_epoch = resumed["at epoch"]
            generators.set(began["generators"])
            if synchronized is not None:
                synchronized.set_state(began["synchronized"])
            loader = self._skip_first(loader, self.batches)
        self._drawn = self.batches
        for batch in loader:
            self.step_complete()
            if resumed is not None and resumed["generators"] is not None:
                generators.set(resumed["generators"])
            resumed = None
            if self._drawn == self.batches:  # else its gradients are added to those of earlier ones
                self._in_epoch.hold()
            self._drawn += 1
            yield batch
        self.step_complete()

    def _save(self, path: Path) -> None:
        accelerator = self._accelerator
        accelerator.project_configuration.automatic_checkpoint_naming = False
        is_at_first = self._at_epoch is not None and not self.batches and not self._in_epoch.is_held
        ours = {
            "position": (self.epoch, self.batches, self.steps),
            "step of accelerate": self._micro_step,
            "generators": None if is_at_first else self._in_epoch.bring_back(),
            "at epoch": self._at_epoch,
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
