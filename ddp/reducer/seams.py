"""Registries through which diagnostics attach to a reducer. The reducer does not import them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddp.reducer.module import DistributedDataParallel
    from ddp.reducer.reducer import Reducer


class Tuner(Protocol):
    """Finds the best bucket size for a reducer."""

    going: bool

    def stop(self, why: str) -> None: ...


tuners: list[Callable[[Reducer], Tuner]] = []
when_built: list[Callable[[DistributedDataParallel], None]] = []
