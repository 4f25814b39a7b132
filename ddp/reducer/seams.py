"""Where diagnostics attach to a reducer: they register themselves here, and the reducer imports none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddp.reducer.module import DistributedDataParallel
    from ddp.reducer.reducer import Reducer


class Tuner(Protocol):
    """Finds the bucket size that suits a reducer."""

    going: bool

    def stop(self, why: str) -> None: ...


tuners: list[Callable[[Reducer], Tuner]] = []
when_built: list[Callable[[DistributedDataParallel], None]] = []
