"""Lightning: a callback.

A failure is noticed in one of two places. Within a batch, that one is trained again after the restart: the counters of
the loops are those of the batch before. Elsewhere (validation, the end of an epoch), the counters are those of the end
of the last batch, which Lightning knows from its own checkpoints.

Lightning trains the first batches of an epoch again after a checkpoint within the epoch, unless the loader has a state.
So this draws as many batches as were trained. Its handler of SIGTERM sends a broadcast, which another collective may
receive. So this puts the one of the script, or of `ddp.on_failure`, in its place.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch

from ddp.elastic import generators
from ddp.last_step import step_complete
from ddp.telemetry.sections import status
from ddp.telemetry.values import log
from ddp_launch_wings.frameworks.resuming import (
    Generators,
    cannot_save_for_all,
    is_first,
    is_launched,
    register,
    saved_path,
)

_OURS = "ddp_launch"
_LOG_EVERY_S = 1.0  # the launcher reads once a second, and a loss on a device is waited for


class LightningHooks:
    """The class of the callback is made of this one and Lightning's, of either package."""

    def __init__(self, package: Any, folder: str | os.PathLike[str] | None) -> None:
        super().__init__()
        self._replicated = (package.strategies.DDPStrategy, package.strategies.SingleDeviceStrategy)
        self._folder = folder
        self._handler = signal.getsignal(signal.SIGTERM)
        self._trainer: Any = None  # while it is this one that is kept
        self._resumed: dict[str, Any] | None = None
        self._step = self._batches = 0  # that are finished: of the training, and of this epoch
        self._loops: dict[str, Any] = {}  # their state then
        self._generators = Generators()
        self._logged_at = 0.0

    def on_fit_start(self, trainer: Any, _module: Any) -> None:
        if is_launched() and not isinstance(trainer.strategy, self._replicated):
            raise cannot_save_for_all(type(trainer.strategy).__name__)
        self._trainer = trainer if is_first() else None
        if self._trainer is not None and (path := saved_path()):
            trainer._checkpoint_connector._restore_modules_and_callbacks(path)
            self._resumed = trainer._checkpoint_connector._loaded_checkpoint[_OURS]

    def on_train_start(self, trainer: Any, _module: Any) -> None:
        if self._trainer is None:
            return
        if self._handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._handler)
        register(self._save, self._folder or trainer.default_root_dir)
        self._step = trainer.global_step
        if self._resumed is not None:
            self._batches = self._resumed["batches"]
            _skip(trainer, self._batches)
            generators.set(self._resumed["after step"])

    def on_train_epoch_start(self, _trainer: Any, _module: Any) -> None:
        self._batches = 0

    def on_train_batch_start(self, trainer: Any, _module: Any, _batch: Any, batch_idx: int) -> None:
        if self._trainer is None:
            return
        if self._resumed is not None:
            self._go_on(trainer.fit_loop.epoch_loop, self._resumed)
            self._resumed = None
        if batch_idx == self._batches:  # else its gradients are added to those of earlier ones
            self._generators.hold()

    def _go_on(self, loop: Any, resumed: dict[str, Any]) -> None:
        loop._batches_that_stepped = resumed["stepped"]
        if resumed["in batch"] is not None:
            generators.set(resumed["in batch"])
            # Lightning has counted the interrupted batch, and does not begin anew.
            loop.batch_progress.total.ready -= 1
            loop.batch_progress.total.started -= 1

    def on_train_batch_end(
        self, trainer: Any, _module: Any, outputs: Any, _batch: Any, batch_idx: int, *_: Any
    ) -> None:
        if self._trainer is None or trainer.global_step == self._step:
            return
        self._step, self._batches = trainer.global_step, batch_idx + 1
        self._loops = trainer.fit_loop.state_dict()
        step_complete()
        total = (
            trainer.max_steps
            if trainer.max_steps > 0
            else trainer.num_training_batches * (trainer.max_epochs or 0)
        )
        is_known = trainer.max_steps > 0 or trainer.accumulate_grad_batches == 1
        known = int(total) if is_known and 0 < total < math.inf else None
        status(f"epoch {trainer.current_epoch}", step=self._step, total=known)
        if trainer.strategy.root_device.type == "cpu" or time.monotonic() - self._logged_at >= _LOG_EVERY_S:
            self._log(outputs)

    def _log(self, outputs: Any = None) -> None:
        self._logged_at = time.monotonic()
        if self._trainer.is_global_zero:
            log(_numbers(self._trainer, outputs), step=self._step)

    def on_train_end(self, *_: Any) -> None:
        if self._trainer is not None:
            self._log()

    def on_validation_batch_start(self, *_: Any) -> None:
        if self._trainer is not None:
            step_complete()  # a rank that is to stop does not wait for the end of the validation

    def _save(self, path: Path) -> None:
        trainer = self._trainer
        if trainer.global_step != self._step:
            raise RuntimeError("the failure came in a batch that has already made an optimizer step")
        loop = trainer.fit_loop.epoch_loop
        in_batch = loop.batch_progress.current.ready > self._batches
        after_step = generators.get()
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        checkpoint["loops"]["fit_loop"] = self._within(trainer) if in_batch else self._loops
        ended = not in_batch and loop.batch_progress.is_last_batch
        checkpoint[_OURS] = {
            "batches": 0 if ended else self._batches,
            "stepped": loop._batches_that_stepped if in_batch else _stepped(self._loops) + 1,
            "after step": after_step,
            "in batch": self._generators.bring_back() if in_batch else None,
        }
        torch.save(checkpoint, path)

    def _within(self, trainer: Any) -> dict[str, Any]:
        loops: dict[str, Any] = trainer.fit_loop.state_dict()
        progress = loops["epoch_loop.batch_progress"]
        # Their gradients are of an optimizer step that did not come.
        lost = progress["current"]["completed"] - self._batches
        for part in (progress["total"], progress["current"]):
            done = part["completed"] - lost
            part.update(ready=done + 1, started=done + 1, processed=done, completed=done)
        progress["is_last_batch"] = False
        loops["state_dict"].pop("combined_loader", None)
        if self._batches and (loaders := self._loops["state_dict"].get("combined_loader")):
            loops["state_dict"]["combined_loader"] = loaders
        return loops


def _stepped(loops: dict[str, Any]) -> int:
    return int(loops["epoch_loop.state_dict"]["_batches_that_stepped"])


def _skip(trainer: Any, batches: int) -> None:
    loop = trainer.fit_loop
    if loop._combined_loader._state_dicts():
        return  # a loader that was brought back to where it was
    for loader in loop._combined_loader.flattened:
        for sampler in (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
            for each in (sampler, getattr(sampler, "sampler", None)):
                if callable(set_epoch := getattr(each, "set_epoch", None)):
                    set_epoch(trainer.current_epoch)
    fetcher = loop._data_fetcher
    iter(fetcher)
    for _ in range(batches):
        next(fetcher)
    fetcher.fetched -= batches  # the loop adds them
    fetcher.done = False


def _numbers(trainer: Any, outputs: Any) -> dict[str, Any]:
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    found = {"loss": loss} if loss is not None else {}
    if batch_size := getattr(trainer.train_dataloader, "batch_size", None):
        found["samples"] = (
            trainer.fit_loop.epoch_loop.batch_progress.total.ready * batch_size * trainer.world_size
        )
    return {**found, **trainer.callback_metrics}
