"""transformers' Trainer: a callback, and `resume_from_checkpoint` of its own.

The Trainer continues within an epoch by itself. Its checkpoint has the generators, which it sets after it has drawn
the first batch, or at the beginning of an epoch before that: what is held here is of the same instant.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from ddp.last_step import step_complete
from ddp.telemetry.sections import status
from ddp.telemetry.values import log
from ddp_launch_wings.frameworks.resuming import (
    Generators,
    is_first,
    is_launched,
    refuse_shards,
    register,
    saved_path,
    write_as_first,
)


def attach(trainer: Any, transformers: Any, folder: str | os.PathLike[str] | None) -> Any:
    if not is_launched():
        return trainer
    refuse_shards(trainer.accelerator)
    hooks = type("LaunchCallback", (TrainerHooks, transformers.TrainerCallback), {})(trainer, folder)
    train = trainer.train

    @functools.wraps(train)
    def resuming(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        hooks.is_kept = is_first()
        path = saved_path() if hooks.is_kept else None
        return train(path or resume_from_checkpoint, *args, **kwargs)

    trainer.train = resuming
    trainer.add_callback(hooks)
    return trainer


class TrainerHooks:
    """The class of the callback is made of this one and that of transformers."""

    def __init__(self, trainer: Any, folder: str | os.PathLike[str] | None) -> None:
        super().__init__()
        self.is_kept = False
        self._trainer, self._folder = trainer, folder
        self._generators = Generators()
        self._is_new_epoch = False

    def on_train_begin(self, args: Any, *_: Any, **__: Any) -> None:
        if self.is_kept:
            register(self._save, self._folder or args.output_dir)

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self._is_new_epoch = True
        self._hold()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if not self._is_new_epoch:
            self._hold()
        self._is_new_epoch = False

    def on_step_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        if self.is_kept:
            self._generators.forget()
            step_complete()
            status(f"epoch {state.epoch:.2f}", step=state.global_step, total=state.max_steps)

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        if self.is_kept:
            step_complete()  # a rank that is to stop does not wait for the end of the evaluation

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self._hold()

    def on_log(self, args: Any, state: Any, *_: Any, logs: Any = None, **__: Any) -> None:
        if self.is_kept and state.is_world_process_zero and logs:
            of_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
            log(logs | {"samples": state.global_step * of_step}, step=state.global_step)

    def _hold(self) -> None:
        if self.is_kept:
            self._generators.hold()

    def _save(self, path: Path) -> None:
        trainer = self._trainer
        write = functools.partial(self._write, str(path))
        write_as_first(trainer.accelerator, trainer.args.world_size, path, "rng_state_{}.pth", write)

    def _write(self, path: str) -> None:
        """As Trainer._save_checkpoint does, but alone: that one waits for the other ranks."""
        trainer = self._trainer
        self._generators.bring_back()
        for each in trainer.model.modules():
            if hasattr(each, "should_save_on_this_rank"):  # it asks torch for the rank
                each.should_save_on_this_rank = lambda is_main_process: is_main_process
        trainer.save_model(path, _internal_call=True)
        trainer._save_optimizer_and_scheduler(path)
        trainer._save_scaler(path)
        trainer._save_rng_state(path)
        state = trainer.state
        for each in (*trainer.callback_handler.callbacks, trainer.control):
            if (name := type(each).__name__) in state.stateful_callbacks and not isinstance(
                state.stateful_callbacks[name], list
            ):
                state.stateful_callbacks[name] = each.state()
        state.save_to_json(f"{path}/trainer_state.json")
