"""Extension points of the reducer: the diagnostics attach here, so that the reducer does not import them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddp.reducer.module import DistributedDataParallel
    from ddp.reducer.reducer import Reducer


class Tuner(Protocol):
    """Finds the best bucket size for a reducer. When it stops, it sets `reducer.tuner` to None."""

    def stop(self, why: str) -> None: ...


start_tuner: Callable[[Reducer], Tuner] | None = None
when_built: list[Callable[[DistributedDataParallel], None]] = []
