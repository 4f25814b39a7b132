"""From rendered objects to pods: what a cluster's controllers and API fill in before a kubelet sees them. Pure.

Services have no address of their own here: a service's name stands for one of its pods. Where pods may be scheduled is
left out: there is one machine.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rules import matches

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Object = dict[str, Any]

_OF_SCHEDULING = ("affinity", "topologySpreadConstraints", "priorityClassName", "serviceAccountName")
_UID = "5f0c"  # of whatever makes pods


@dataclass(frozen=True)
class Pod:
    name: str  # and its host name
    namespace: str
    labels: Mapping[str, str]
    spec: Mapping[str, Any]
    claims: Mapping[str, str]  # volume of a set's claim -> the claim that is this pod's own
    keeps_its_place: bool  # a pod of a set, not of a job
    number: int = 0  # of its address

    @property
    def container(self) -> Mapping[str, Any]:
        (only,) = self.spec["containers"]
        return dict(only)

    @property
    def group(self) -> int:
        return int(self.spec["securityContext"]["fsGroup"])

    @property
    def user(self) -> int:
        return int(self.spec["securityContext"]["runAsUser"])

    def port(self, wanted: str | int) -> int:
        """Of a probe: a number, or a name among the container's ports."""
        if isinstance(wanted, int):
            return wanted
        return next(int(p["containerPort"]) for p in self.container["ports"] if p["name"] == wanted)


def pods_of(found: Object) -> list[Pod]:
    """Those of a StatefulSet or of an Indexed Job; nothing else makes pods."""
    match found["kind"]:
        case "StatefulSet":
            return [_pod(found, i, {}) for i in range(found["spec"]["replicas"])]
        case "Job":
            assert found["spec"]["completionMode"] == "Indexed"
            return [_pod(found, i, _of_a_job(found, i)) for i in range(found["spec"]["completions"])]
        case _:
            return []


def _of_a_job(found: Object, index: int) -> dict[str, str]:
    prefix = "batch.kubernetes.io/"
    labels = {
        "job-name": found["metadata"]["name"],
        "controller-uid": _UID,
        "job-completion-index": str(index),
    }
    return {f"{prefix}{name}": value for name, value in labels.items()}


def _pod(found: Object, index: int, labels: Mapping[str, str]) -> Pod:
    template = copy.deepcopy(found["spec"]["template"])
    name = f"{found['metadata']['name']}-{index}"
    namespace = found["metadata"].get("namespace", "default")
    labels = template["metadata"]["labels"] | labels
    spec = template["spec"]
    for leave_out in _OF_SCHEDULING:
        spec.pop(leave_out, None)
    claims = [each["metadata"]["name"] for each in found["spec"].get("volumeClaimTemplates", [])]
    if found["kind"] == "StatefulSet":
        spec["subdomain"] = found["spec"]["serviceName"]
    fields = {"metadata.name": name, "metadata.namespace": namespace}
    fields |= {f"metadata.labels['{key}']": value for key, value in labels.items()}
    for container in spec["containers"]:
        if found["kind"] == "Job":
            container.setdefault("env", []).append({"name": "JOB_COMPLETION_INDEX", "value": str(index)})
        _fill_in(container, fields)
    own = {claim: f"{claim}-{name}" for claim in claims}
    return Pod(name, namespace, labels, spec, own, found["kind"] == "StatefulSet")


def _fill_in(container: Object, fields: Mapping[str, str]) -> None:
    """Values from fields, and $(NAME) in variables, commands and arguments: names that were said before."""
    known: dict[str, str] = {}

    def expanded(text: str) -> str:
        for name, value in known.items():
            text = text.replace(f"$({name})", value)
        return text

    for variable in container.get("env", []):
        source = variable.pop("valueFrom", None)
        value = fields[source["fieldRef"]["fieldPath"]] if source else expanded(variable["value"])
        variable["value"] = known[variable["name"]] = value
    for words in ("command", "args"):
        if words in container:
            container[words] = [expanded(each) for each in container[words]]


def names(pods: Iterable[Pod], services: Sequence[Object]) -> dict[str, Pod]:
    """What the cluster's name service would answer: name -> the pod whose address it stands for.

    A service's name stands for the first of its pods. With all of them in a hosts file, gRPC would take every name of
    any of these addresses for a name of them all.
    """
    found: dict[str, Pod] = {}
    for pod in pods:
        for service in services:
            if service["metadata"]["namespace"] != pod.namespace or "selector" not in service["spec"]:
                continue
            if not matches({"matchLabels": service["spec"]["selector"]}, dict(pod.labels)):
                continue
            name = service["metadata"]["name"]
            where = f"{name}.{pod.namespace}.svc"
            found.setdefault(where, pod)
            if pod.spec.get("subdomain") == name and service["spec"].get("clusterIP") == "None":
                found[f"{pod.name}.{where}"] = pod
    return found
