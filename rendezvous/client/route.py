"""Which endpoint to call: the replica that owns the job, once a redirect has given its address."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rendezvous.values.wire_names import OWNER_METADATA

if TYPE_CHECKING:
    from collections.abc import Sequence

    import grpc.aio


class Route:
    """Uses the endpoints in turn. A redirect applies only to the next call."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._endpoints, self._at = tuple(endpoints), 0
        self.owner = ""  # from the latest redirect

    @property
    def endpoint(self) -> str:
        return self.owner or self._endpoints[self._at % len(self._endpoints)]

    def refused(self, error: grpc.aio.AioRpcError) -> None:
        trailing = error.trailing_metadata() or ()
        self.owner = next((str(value) for key, value in trailing if key == OWNER_METADATA), "")
        self._at += 1
