"""Who may open a connection to whom, by the network policies of a set of objects: as their API defines it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import rules

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Peer:
    """Its labels, and those of its namespace: "" is the one that the policies are in."""

    labels: Mapping[str, str]
    namespace: str = ""
    namespace_labels: Mapping[str, str] = field(default_factory=dict)
    ports: Mapping[str, int] = field(default_factory=dict)


def of(objects: Sequence[Object], owner: str) -> Peer:
    """The pods that `owner` (kind/name) makes."""
    (template,) = (template for whose, template, _ in rules.pods(objects) if whose == owner)
    ports = {
        port["name"]: port["containerPort"]
        for each in rules.containers(template)
        for port in each.get("ports", [])
    }
    return Peer(template["metadata"]["labels"], ports=ports)


def is_open(objects: Sequence[Object], source: Peer, target: Peer, port: int) -> bool:
    return _allows(objects, "Egress", source, target, target, port) and _allows(
        objects, "Ingress", target, source, target, port
    )


def _allows(objects: Sequence[Object], way: str, here: Peer, there: Peer, target: Peer, port: int) -> bool:
    if here.namespace:
        return True  # its policies are its namespace's
    policies = [
        found["spec"]
        for found in objects
        if found["kind"] == "NetworkPolicy"
        and way in found["spec"]["policyTypes"]
        and rules.matches(found["spec"]["podSelector"], here.labels)
    ]
    if not policies:
        return True  # nobody has said anything: everything goes
    key, peers = ("egress", "to") if way == "Egress" else ("ingress", "from")
    return any(
        _is_one_of(rule.get(peers), there) and _has(rule.get("ports"), target, port)
        for policy in policies
        for rule in policy.get(key, [])
    )


def _is_one_of(peers: list[Object] | None, there: Peer) -> bool:
    return not peers or any(_is(each, there) for each in peers)


def _is(wanted: Object, there: Peer) -> bool:
    if "ipBlock" in wanted:
        return False  # of pods, none is meant by an address
    if "namespaceSelector" in wanted:
        near = rules.matches(wanted["namespaceSelector"], there.namespace_labels)
    else:
        near = not there.namespace
    return near and rules.matches(wanted.get("podSelector", {}), there.labels)


def _has(ports: list[Object] | None, target: Peer, port: int) -> bool:
    return not ports or port in [target.ports.get(each["port"], each["port"]) for each in ports]
