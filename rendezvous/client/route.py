"""Which endpoint to call: the replica that decides about the job, as soon as a refused call has named it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rendezvous.values.wire_names import OWNER_METADATA

if TYPE_CHECKING:
    from collections.abc import Sequence

    import grpc.aio


class Route:
    """Goes through the endpoints in turn, and follows each redirect for one call."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._endpoints, self._at = tuple(endpoints), 0
        self.owner = ""  # named by the latest refused call

    @property
    def endpoint(self) -> str:
        return self.owner or self._endpoints[self._at % len(self._endpoints)]

    def refused(self, error: grpc.aio.AioRpcError) -> None:
        trailing = error.trailing_metadata() or ()
        self.owner = next((str(value) for key, value in trailing if key == OWNER_METADATA), "")
        self._at += 1
