"""What the chart makes, at a real API server that enforces the restricted standard: taken, placed, and upgraded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import charts
import control_plane
import pytest
import yaml
from control_plane import ControlPlane, eventually
from test_helm_chart import COMBINATIONS, PRODUCTION

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.skipif(bool(control_plane.what_is_missing()), reason=control_plane.what_is_missing() or "-"),
    pytest.mark.nightly(instead="deploy/test_helm_chart.py"),
    pytest.mark.timeout(600),
]
_NAMESPACE = (charts.DEPLOY / "kubernetes" / "base" / "namespace.yaml").read_text()


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    made = ControlPlane(tmp_path_factory.mktemp("plane"))
    try:
        made.start()
        made.add_nodes(6)
        made.kubectl("label", "nodes", "--all", "pool=services")
        made.add_storage(40)
        yield made
    finally:
        made.close()


def apply(plane: ControlPlane, values: dict[str, Any], namespace: str) -> None:
    text = yaml.safe_dump_all(charts.rendered(values, namespace=namespace))
    said = plane.kubectl("-n", namespace, "apply", "--server-side", "-f", "-", text=text)
    assert said.count("serverside-applied") == text.count("apiVersion:"), said


def placed(plane: ControlPlane, namespace: str) -> dict[str, str]:
    """Pod -> node: it was let in, its claims are bound, its priority is known."""
    pods = plane.get("pods", "-n", namespace) or []
    return {each["metadata"]["name"]: each["spec"].get("nodeName", "") for each in pods}


@pytest.mark.parametrize("name", ["production", "dev", "memory", "another priority", "everything else"])
def test_a_cluster_takes_what_values_make(plane: ControlPlane, name: str) -> None:
    namespace = name.replace(" ", "-")
    plane.kubectl("apply", "-f", "-", text=_NAMESPACE.replace("name: ddp-rendezvous", f"name: {namespace}"))
    values = COMBINATIONS[name]
    here = {"storage": {"size": "8Gi", "storageClassName": ""}}  # volumes as this cluster has them
    apply(plane, {**values, "etcd": {**values.get("etcd", {}), **here}}, namespace)
    sets = plane.get("statefulsets", "-n", namespace)
    wanted = {f"{each['metadata']['name']}-{i}" for each in sets for i in range(each["spec"]["replicas"])}
    eventually(lambda: placed(plane, namespace).keys() == wanted, f"pods {sorted(wanted)}")
    eventually(lambda: all(placed(plane, namespace).values()), "a node for each")
    nodes = [node for pod, node in placed(plane, namespace).items() if "etcd" not in pod]
    assert len(set(nodes)) == len(nodes)  # no two on one
    plane.kubectl("delete", "namespace", namespace, "--wait=false")


def test_what_is_upgraded_may_be_changed(plane: ControlPlane) -> None:
    """Of a set, much may never be: nothing that values say changes it by the way."""
    plane.kubectl("apply", "-f", "-", text=_NAMESPACE.replace("name: ddp-rendezvous", "name: upgraded"))
    apply(plane, PRODUCTION, "upgraded")
    changed = {
        "replicas": 5,
        "image": {"tag": "0.2.0"},
        "tokens": {"secret": "others"},
        "podLabels": {"team": "ml"},
        "extraEnv": [{"name": "DDP_RENDEZVOUS_HISTORY", "value": "30"}],
        "etcd": {"initialClusterState": "existing", "image": {"tag": "v3.5.27"}},
        "monitoring": {"enabled": False},
    }
    apply(plane, changed, "upgraded")
    sets = {each["metadata"]["name"]: each["spec"] for each in plane.get("statefulsets", "-n", "upgraded")}
    assert sets["ddp-rendezvous"]["replicas"] == 5
    image = sets["ddp-rendezvous-etcd"]["template"]["spec"]["containers"][0]["image"]
    assert image == "quay.io/coreos/etcd:v3.5.27"
