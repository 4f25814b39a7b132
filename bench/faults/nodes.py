"""An agent, a machine or the service is gone: the node is named, no rank is, and the rest goes on.

Two agents on this machine, the service in a process of its own. What takes a network of its own is in networks.py.
"""

from __future__ import annotations

from typing import Any

from fault_case import REGULARLY_S, Case, Kind

_LOST = "node .* was lost"


def node(name: str, injected: str, outside: str, says: str = _LOST, **more: Any) -> Case:
    given: dict[str, Any] = {"nodes": 2, "ranks": 2, "wrap": "plain", "blamed": (), "has_service": True}
    return Case(name, injected, says, Kind.NODE, outside=outside, **(given | more))


NODES = (
    node("agent-killed", "SIGKILL to the agent of the second node", "kill_agent"),
    node("agent-stopped", "SIGSTOP to the agent of the second node, SIGKILL to its ranks", "stop_agent"),
    node("node-frozen", "SIGSTOP to all processes of the second node", "stop_node", trains_s=REGULARLY_S),
    node(
        "template-killed",
        "SIGKILL to the zygote, which forks the ranks",
        "kill_zygote",
        "zygote",
        blamed=(2,),  # the first of those that had to stop for it; the words say what it was
    ),
    node(
        "service-gone",
        "SIGSTOP to a rank while the service is down; the service returns after 6 s",
        "stop_rank_without_service",
        "stopped by a signal",
        blamed=(3,),
        bound_s=18.0,  # six of them without the service, up to eight until the last agent tries again
    ),
    Case(
        "service-restarts",
        "the service is killed and restarts",
        "",
        Kind.INNOCENT,
        outside="restart_service",
        blamed=(),
        nodes=2,
        ranks=2,
        wrap="plain",
        has_service=True,
    ),
)
