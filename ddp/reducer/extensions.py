"""Extension points of the reducer: the diagnostics attach here, so that the reducer does not import them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class Tuner(Protocol):
    """Finds the best bucket size for a reducer. When it stops, it sets `reducer.tuner` to None."""

    def stop(self, why: str) -> None: ...


start_tuner: Callable[[Any], Tuner] | None = None  # gets the reducer
when_built: list[Callable[[Any], None]] = []  # get the wrapper
