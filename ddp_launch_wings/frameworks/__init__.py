"""`ddp.integrations`: one line for those whose loop belongs to Lightning, to transformers' Trainer, or to accelerate.

Each is a thin layer over `ddp.on_failure`: a survivor writes the checkpoint of the framework, and the next generation
resumes with it in the way of the framework. Only what a checkpoint of the framework lacks is added: the position in the
epoch and the random generators. The script imports the frameworks; this package does not.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from ddp.telemetry.coded import WrongType, WrongUse

__all__ = ["LightningCallback", "attach"]

_OLDEST = {"lightning": (2, 4), "pytorch_lightning": (2, 4), "transformers": (5, 0), "accelerate": (1, 6)}
_LIGHTNINGS = ("lightning", "pytorch_lightning")
_USE = "Use a Trainer of Lightning, a Trainer of transformers, or an Accelerator"


def attach(trainer: Any, folder: str | os.PathLike[str] | None = None) -> Any:
    """Lose no finished step of this trainer: call it once on all ranks, before the training.

    `trainer`: a Trainer of Lightning or transformers, or an Accelerator after `prepare`. `folder`: where a survivor
    saves, by default the folder of the trainer's own checkpoints. All nodes must reach it. Returns the trainer, or
    for an Accelerator the `Epochs` to loop over. Without the launcher, this has no effect.
    """
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(trainer).__mro__}
    for framework in _LIGHTNINGS:
        if (framework, "Trainer") in kinds:
            trainer.callbacks.append(_lightning(framework, folder))
            return trainer
    if ("transformers", "Trainer") in kinds:
        from ddp_launch_wings.frameworks import trainer_callback

        return trainer_callback.attach(trainer, _supported("transformers"), folder)
    if ("accelerate", "Accelerator") in kinds:
        from ddp_launch_wings.frameworks import epochs

        return epochs.Epochs(trainer, _supported("accelerate"), folder)
    raise WrongType(f"ddp.integrations.attach does not know {type(trainer).__qualname__}. {_USE}")


def LightningCallback(folder: str | os.PathLike[str] | None = None) -> Any:
    """Return the callback for `Trainer(callbacks=[...])`; `attach(trainer)` adds it to a Trainer that exists."""
    loaded = [name for name in _LIGHTNINGS if name in sys.modules]
    return _lightning(loaded[0] if loaded else "lightning", folder)


def _lightning(framework: str, folder: str | os.PathLike[str] | None) -> Any:
    _supported(framework)
    package = sys.modules["lightning.pytorch" if framework == "lightning" else framework]
    from ddp_launch_wings.frameworks.lightning_callback import LightningHooks

    return type("LightningCallback", (LightningHooks, package.Callback), {})(package, folder)


def _supported(framework: str) -> Any:
    oldest = ".".join(map(str, _OLDEST[framework]))
    advice = f'{sys.executable} -m pip install "{framework.replace("_", "-")}>={oldest}"'
    package = sys.modules.get(framework)
    if package is None:
        raise WrongUse(f"{framework} is not imported. Import it before this call. To install it: {advice}")
    if tuple(map(int, package.__version__.split(".")[:2])) < _OLDEST[framework]:
        raise WrongUse(
            f"ddp.integrations needs {framework} {oldest} or later, not {package.__version__}: {advice}"
        )
    return package
