"""How a client finds the replica that decides about a job."""

import grpc
from grpc.aio import AioRpcError, Metadata

from rendezvous.client.channel import Route


def refusal(owner: str = "") -> AioRpcError:
    trailing = Metadata(("rendezvous-owner", owner)) if owner else Metadata()
    return AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), trailing)


def test_endpoints_are_called_in_turn() -> None:
    route = Route(["a:1", "b:1"])
    called = []
    for _ in range(3):
        called.append(route.endpoint)
        route.refused(refusal())
    assert called == ["a:1", "b:1", "a:1"]


def test_a_redirect_is_followed_once() -> None:
    """An owner that has gone since does not hold the client up."""
    route = Route(["a:1", "b:1"])
    route.refused(refusal("c:1"))
    assert (route.endpoint, route.owner) == ("c:1", "c:1")
    route.refused(refusal())
    assert (route.endpoint, route.owner) == ("a:1", "")
