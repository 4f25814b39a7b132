"""What a case sees of the world: the class under test, its place among the ranks, and a book to write into."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transcript import ENDED, Transcript, plain

if TYPE_CHECKING:
    import warnings
    from collections.abc import Callable


def class_of(side: str) -> type[torch.nn.Module]:
    """`ours`, `torch`, or the path of another class that stands in for ours: `module:Class`."""
    if side == "torch":
        return torch.nn.parallel.DistributedDataParallel
    if side == "ours":
        from ddp import DistributedDataParallel

        return DistributedDataParallel
    import importlib

    module, _, name = side.partition(":")
    found: type[torch.nn.Module] = getattr(importlib.import_module(module), name)
    return found


class Trial:
    def __init__(self, rank: int, world_size: int, side: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self.side = side
        self.DDP: Any = class_of(side)
        self._notes: list[tuple[str, Any]] = []
        self._alike: set[str] = set()
        self._remarks: list[tuple[str, str]] = []
        self._times: dict[str, int] = {}

    @property
    def is_ours(self) -> bool:
        return self.side != "torch"

    def note(self, label: str, value: Any, alike: bool = False) -> None:
        """Compared with the other side; with `alike`, on all ranks as well, to the bit."""
        self._times[label] = self._times.get(label, 0) + 1
        label = label if self._times[label] == 1 else f"{label} ({self._times[label]})"
        self._notes.append((label, plain(value)))
        if alike:
            self._alike.add(label)

    def remark(self, label: str, text: str) -> None:
        self._remarks.append((label, text))

    def attempt(self, label: str, act: Callable[[], Any]) -> Any:
        """Does it, and notes whether that raised, and what; the message is remarked, not compared."""
        try:
            result = act()
        except Exception as error:
            self.note(label, f"raised {self.caught_as(error)}")
            self.remark(label, str(error))
            return None
        self.note(label, "went well")
        return result

    @staticmethod
    def caught_as(error: BaseException) -> str:
        """The class by which a script catches it: ours carry codes, and are subclasses of those that torch raises."""
        ours = type(error).__module__.split(".")[0] == "ddp"
        return next(
            each.__name__ for each in type(error).__mro__ if not ours or each.__module__ == "builtins"
        )

    def failed(self, error: Exception) -> None:
        """The case itself ended in an error."""
        import traceback

        self.note(ENDED, self.caught_as(error))
        self.remark(ENDED, "".join(traceback.format_exception(error)[-6:]))

    def warned(self, messages: list[warnings.WarningMessage]) -> None:
        for each in messages:
            self.remark("warning", f"{each.category.__name__}: {each.message}")

    def transcript(self) -> Transcript:
        return Transcript(tuple(self._notes), frozenset(self._alike), tuple(self._remarks))

    # --- what cases have in common -------------------------------------------------------------------

    def wrap(self, module: torch.nn.Module, **options: Any) -> Any:
        return self.DDP(module, **options)

    def wrap_strictly(self, module: torch.nn.Module, **options: Any) -> Any:
        """For what torch's class refuses: ours averages it, unless it is told to be as strict."""
        return self.wrap(module, **options, **({"strict": True} if self.side == "ours" else {}))

    def data(
        self, *shape: int, step: int = 0, dtype: torch.dtype = torch.float32, rank: int | None = None
    ) -> torch.Tensor:
        """This rank's input of one step: others have others, both sides the same."""
        source = torch.Generator().manual_seed(1000 * (self.rank if rank is None else rank) + step)
        return torch.randn(shape, generator=source, dtype=torch.float64).to(dtype)

    def mean_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a gradient must be after averaging, by the plainest of means."""
        total = tensor.detach().to(torch.float64).clone()
        dist.all_reduce(total)
        return total / self.world_size
