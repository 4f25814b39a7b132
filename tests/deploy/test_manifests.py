"""The manifests of deploy/kubernetes: built, held against three versions of the schemas, and against rules."""

from __future__ import annotations

import copy
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import pytest
import rules
import yaml

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2] / "deploy" / "kubernetes"
VERSIONS = ("1.35", "1.36", "1.37")
OVERLAYS = ("dev", "production")
# Of other projects; schemas of Kubernetes do not hold them.
FOREIGN = ("cert-manager.io", "monitoring.coreos.com")

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl on this machine")


@cache
def built(overlay: str) -> tuple[dict[str, Any], ...]:
    command = ["kubectl", "kustomize", str(ROOT / "overlays" / overlay)]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return tuple(yaml.safe_load_all(text))


def one(objects: list[Any], kind: str, name: str = "ddp-rendezvous") -> Any:
    return next(each for each in objects if each["kind"] == kind and each["metadata"]["name"] == name)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_fits_the_schemas(overlay: str, version: str) -> None:
    held = 0
    for found in built(overlay):
        if not found["apiVersion"].startswith(FOREIGN):
            kubernetes_validate.validate(found, version, strict=True)
            held += 1
    assert held >= 6


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_breaks_no_rule(overlay: str) -> None:
    assert rules.broken(built(overlay)) == []


def test_production_survives_the_loss_of_any_one() -> None:
    objects = list(built("production"))
    for name in ("ddp-rendezvous", "ddp-rendezvous-etcd"):
        spec = one(objects, "StatefulSet", name)["spec"]
        assert spec["replicas"] == 3
        apart = spec["template"]["spec"]["affinity"]["podAntiAffinity"]
        labels = spec["template"]["metadata"]["labels"]
        (term,) = apart["requiredDuringSchedulingIgnoredDuringExecution"]
        assert rules.matches(term["labelSelector"], labels)
        (spread,) = spec["template"]["spec"]["topologySpreadConstraints"]
        assert rules.matches(spread["labelSelector"], labels)
        assert one(objects, "PodDisruptionBudget", name)["spec"]["maxUnavailable"] == 1


def test_production_asks_everybody_who_they_are() -> None:
    (container,) = one(list(built("production")), "StatefulSet")["spec"]["template"]["spec"]["containers"]
    said = {each["name"]: each.get("value") for each in container["env"]}
    assert {"DDP_RENDEZVOUS_TLS_CERT", "DDP_RENDEZVOUS_CLIENT_CA", "DDP_RENDEZVOUS_TOKEN_KEYS"} <= said.keys()
    assert "DDP_RENDEZVOUS_INSECURE" not in said
    assert said["DDP_RENDEZVOUS_STORE"].count(":2379") == 3


def test_the_service_can_be_started_as_the_manifests_say(tmp_path: Path) -> None:
    """Its own reader of settings takes every variable that they set."""
    from rendezvous.settings import parse_serve

    for overlay in OVERLAYS:
        (container,) = one(list(built(overlay)), "StatefulSet")["spec"]["template"]["spec"]["containers"]
        said = {each["name"]: each.get("value", "pod-0") for each in container["env"]}
        for name, value in said.items():
            said[name] = value.replace("$(POD_NAME)", "pod-0").replace("$(POD_NAMESPACE)", "ns")
        settled = parse_serve(container["args"][1:], said)
        known = {f"DDP_RENDEZVOUS_{name.upper()}" for name in settled}
        assert {name for name in said if name.startswith("DDP_RENDEZVOUS")} <= known


def test_the_way_to_the_name_service_is_open_to_all() -> None:
    """A tool that adds labels to selectors adds them to those of other people's pods, too."""
    for overlay in OVERLAYS:
        spec = one(list(built(overlay)), "NetworkPolicy", "to-the-name-service")["spec"]
        assert spec["podSelector"] == {}
        (to,) = spec["egress"][0]["to"]
        assert to["podSelector"] == {"matchLabels": {"k8s-app": "kube-dns"}}


# --- the rules themselves ---------------------------------------------------------------------------------


def _set(objects: list[Any]) -> Any:
    return one(objects, "StatefulSet")["spec"]


def _pod(objects: list[Any]) -> Any:
    return _set(objects)["template"]["spec"]


BREAKAGES: dict[str, Callable[[list[Any]], Any]] = {
    "nobody knows this kind": lambda o: o.append({"kind": "Statefulset", "metadata": {"name": "x"}}),
    "twice": lambda o: o.append(copy.deepcopy(o[0])),
    "its selector finds nobody": lambda o: one(o, "Service")["spec"]["selector"].update(app="other"),
    "does not match its own pods": lambda o: _set(o)["selector"]["matchLabels"].update(app="other"),
    "its pods have no port": lambda o: one(o, "Service")["spec"]["ports"][0].update(targetPort="grcp"),
    "there is no headless service": lambda o: _set(o).update(serviceName="ddp-rendezvous"),
    "which is no volume": lambda o: _pod(o)["volumes"].pop(),
    "is mounted nowhere": lambda o: _pod(o)["volumes"].append({"name": "more", "emptyDir": {}}),
    "nobody makes the secret": lambda o: _pod(o)["volumes"].append(
        {"name": "tls2", "secret": {"secretName": "x"}}
    ),
    "requests more": lambda o: _pod(o)["containers"][0]["resources"]["requests"].update(cpu="3"),
    "no limit of memory": lambda o: _pod(o)["containers"][0]["resources"]["limits"].pop("memory"),
    "runs as root": lambda o: _pod(o)["securityContext"].update(runAsUser=0),
    "can do more than it must": lambda o: _pod(o)["containers"][0]["securityContext"].pop("capabilities"),
    "is given a token of the API": lambda o: _pod(o).pop("automountServiceAccountToken"),
    "would be taken for settings": lambda o: _pod(o).pop("enableServiceLinks"),
    "is nowhere said before": lambda o: _pod(o)["containers"][0]["env"].reverse(),
    "which there is not": lambda o: _pod(o)["containers"][0]["livenessProbe"]["httpGet"].update(port="web"),
    "lets in to port": lambda o: one(o, "NetworkPolicy")["spec"]["ingress"][0]["ports"][0].update(
        port="gprc"
    ),
    "may ever go": lambda o: one(o, "PodDisruptionBudget")["spec"].update(maxUnavailable=0),
}


@pytest.mark.parametrize("words", BREAKAGES)
def test_a_rule_finds_what_it_is_for(words: str) -> None:
    objects = copy.deepcopy(list(built("production")))
    BREAKAGES[words](objects)
    assert any(words in found for found in rules.broken(objects))
