"""What the integrations have in common: where a survivor saves, and who may."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp.elastic import generators
from ddp.elastic.files import lease
from ddp.last_step import on_failure, resume_path
from ddp.telemetry import status_page
from ddp.telemetry.coded import WrongUse
from ddp.telemetry.contracts import SCRATCH

_REPLICATED = {"NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_HPU"}

_ADVICE = "Two jobs would replace each other's last step. Give attach() or LightningCallback() another folder= in one"


def is_launched() -> bool:
    return bool(os.environ.get(SCRATCH))


def is_first() -> bool:
    """Whether this is the first training of this process. A saved state could not tell to which one it belongs."""
    first = is_launched() and status_page.once("ddp.integrations")
    if is_launched() and not first and os.environ.get("RANK") == "0":
        sys.stderr.write(
            "ddp.integrations: only the first training of a process is kept, and this is a later one\n"
        )
    return first


def saved_path() -> str | None:
    path = resume_path()
    if path and not os.path.exists(path):
        raise WrongUse(
            f"the state that was saved before the restart is not here: {path}. With several nodes, give attach() or "
            "LightningCallback() a folder= that they share"
        )
    return path


def register(save: Callable[[Path], None], folder: str | os.PathLike[str]) -> None:
    place = (Path(folder) / "ddp-launch").absolute()
    held = lease.take(place, lease.this_process(), _ADVICE) if os.environ.get("RANK") == "0" else None
    parent = next(each for each in place.parents if each.exists())
    if os.environ.get("LOCAL_RANK") == "0" and not (parent.is_dir() and os.access(parent, os.W_OK)):
        sys.stderr.write(
            f"ddp.integrations: nothing can be written in {parent}, so a failure will cost all steps since the last "
            "checkpoint. Give attach() or LightningCallback() another folder=\n"
        )

    def save_last_step(_reason: str, _held: object = held) -> Path:
        path = _free_place(place)
        save(path)
        return path

    on_failure(save_last_step)


def _free_place(folder: Path) -> Path:
    """One of two, and not the one that this generation has begun with: a next one may still need that."""
    path = folder / ("last-step-b" if (resume_path() or "").endswith("last-step-a") else "last-step-a")
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return path


class Generators:
    """The random generators as they were at another instant than after the last optimizer step."""

    def __init__(self) -> None:
        self._holder = generators.GeneratorHolder()
        self._held: generators.Held | None = None

    @property
    def is_held(self) -> bool:
        return self._held is not None

    def hold(self) -> None:
        self._held = self._holder.hold()

    def forget(self) -> None:
        self._held = None

    def bring_back(self) -> dict[str, Any]:
        """Set what is held, if anything is, and return the states, for `ddp.elastic.generators.set`."""
        if self._held is not None:
            self._holder.set_back(self._held)
        return generators.get()


def refuse_shards(accelerator: Any) -> None:
    kind = accelerator.distributed_type.name
    if is_launched() and kind not in _REPLICATED:
        raise cannot_save_for_all(kind)


def cannot_save_for_all(kind: str) -> WrongUse:
    return WrongUse(
        f"ddp.integrations lets one rank save for all, but with {kind} each rank may have another part of the state. "
        "Use ddp.elastic.State, or the checkpoints of the framework"
    )


def write_as_first(
    accelerator: Any, world_size: int, path: Path, name: str, save: Callable[[], None]
) -> None:
    """Let this process write what rank 0 would. It ends afterwards.

    `name`: of the file with the generators of a rank. All ranks get those of this one, as after the same seed.
    """
    partial = sys.modules[type(accelerator.state).__module__].PartialState
    for kept in (vars(accelerator.state), partial._shared_state):
        kept["process_index"] = kept["local_process_index"] = 0
    path.mkdir()
    save()
    for rank in range(1, world_size):
        if (path / name.format(0)).exists():
            shutil.copy(path / name.format(0), path / name.format(rank))
