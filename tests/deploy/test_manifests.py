"""The manifests of deploy/kubernetes: built, held against three versions of the schemas, and against rules."""

from __future__ import annotations

import copy
import subprocess
from typing import TYPE_CHECKING, Any

import charts
import custom_resources
import jsonschema
import kubernetes_validate
import pytest
import rules
import who_reaches
from serve_settings import parse_serve

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

VERSIONS = ("1.35", "1.36", "1.37")
OVERLAYS = ("dev", "production")

pytestmark = charts.needs_kubectl


built = charts.overlay


def one(objects: list[Any], kind: str, name: str = "ddp-rendezvous") -> Any:
    return next(each for each in objects if each["kind"] == kind and each["metadata"]["name"] == name)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_fits_the_schemas(overlay: str, version: str) -> None:
    held = 0
    for found in built(overlay):
        if found["kind"] not in custom_resources.KINDS:
            kubernetes_validate.validate(found, version, strict=True)
            held += 1
    assert held >= 6


def test_what_other_projects_read_fits_their_schemas() -> None:
    held = [each for each in built("production") if each["kind"] in custom_resources.KINDS]
    for found in held:
        custom_resources.validate(found)
    assert {each["kind"] for each in held} == custom_resources.KINDS


WRONG: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a field that is misspelt": ("Certificate", lambda spec: spec.update(dnsName=["x"])),
    "a length in days": ("Certificate", lambda spec: spec.update(duration="30d")),
    "a usage that is none": ("Certificate", lambda spec: spec.update(usages=["server"])),
    "two kinds of issuer": ("Issuer", lambda spec: spec.update(ca={"secretName": "x"}, selfSigned={})),
    "no port": ("ServiceMonitor", lambda spec: spec["endpoints"][0].pop("port")),
    "an interval without unit": (
        "PodMonitor",
        lambda spec: spec["podMetricsEndpoints"][0].update(interval="15"),
    ),
    "no expression": ("PrometheusRule", lambda spec: spec["groups"][0]["rules"][0].pop("expr")),
}


@pytest.mark.parametrize("what", WRONG)
def test_those_schemas_refuse(what: str) -> None:
    kind, spoil = WRONG[what]
    found = copy.deepcopy(next(each for each in built("production") if each["kind"] == kind))
    spoil(found["spec"])
    with pytest.raises(jsonschema.ValidationError):
        custom_resources.validate(found)


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
        service, node_local = spec["egress"][0]["to"]
        assert service["podSelector"] == {"matchLabels": {"k8s-app": "kube-dns"}}
        assert node_local == {"ipBlock": {"cidr": "169.254.20.10/32"}}


def test_who_reaches_whom() -> None:
    objects = built("production")
    service = who_reaches.of(objects, "StatefulSet/ddp-rendezvous")
    etcd = who_reaches.of(objects, "StatefulSet/ddp-rendezvous-etcd")
    snapshot = who_reaches.of(objects, "CronJob/ddp-rendezvous-etcd-snapshot")
    jobs, nobody = {"ddp-launch/jobs": "allowed"}, {"name": "default"}
    job = who_reaches.Peer({"ddp-launch/role": "worker"}, "training", jobs)
    operator = who_reaches.Peer({"ddp-launch/role": "operator"}, "training", jobs)
    stray = who_reaches.Peer({"ddp-launch/role": "worker"}, "default", nobody)
    other_pod = who_reaches.Peer({}, "training", jobs)
    prometheus = who_reaches.Peer({}, "monitoring", {"ddp-launch/monitoring": "allowed"})
    ways = {
        ("job", "service", 29400): (job, service, True),
        ("operator", "service", 29400): (operator, service, True),
        ("job", "metrics", 9400): (job, service, False),
        ("job of a strange namespace", "service", 29400): (stray, service, False),
        ("another pod of the jobs' namespace", "service", 29400): (other_pod, service, False),
        ("prometheus", "metrics", 9400): (prometheus, service, True),
        ("prometheus", "service", 29400): (prometheus, service, False),
        ("prometheus", "etcd's metrics", 2381): (prometheus, etcd, True),
        ("prometheus", "etcd", 2379): (prometheus, etcd, False),
        ("job", "etcd", 2379): (job, etcd, False),
        ("service", "etcd", 2379): (service, etcd, True),
        ("service", "etcd's peers", 2380): (service, etcd, False),
        ("snapshot", "etcd", 2379): (snapshot, etcd, True),
        ("snapshot", "service", 29400): (snapshot, service, False),
        ("etcd", "its peers", 2380): (etcd, etcd, True),
        ("etcd", "service", 29400): (etcd, service, False),
        ("service", "the world", 443): (service, who_reaches.Peer({}, "default", nobody), False),
    }
    wrong = [
        way for way, (a, b, wanted) in ways.items() if who_reaches.is_open(objects, a, b, way[2]) != wanted
    ]
    assert wrong == []


def test_a_jobs_certificate_opens_no_etcd() -> None:
    """Who signs for jobs signs nothing that etcd believes."""
    signed_by = {
        each["metadata"]["name"]: each["spec"]["issuerRef"]["name"]
        for each in built("production")
        if each["kind"] == "Certificate"
    }
    assert signed_by["ddp-rendezvous-client"] == signed_by["ddp-rendezvous-server"]
    assert signed_by["ddp-rendezvous-etcd"] == signed_by["ddp-rendezvous-etcd-client"]
    assert signed_by["ddp-rendezvous-client"] != signed_by["ddp-rendezvous-etcd-client"]


def test_members_of_etcd_believe_each_other() -> None:
    """A member looks up the names in a peer's certificate: one of them, without a star, must lead to its address."""
    objects = list(built("production"))
    names = one(objects, "Certificate", "ddp-rendezvous-etcd")["spec"]["dnsNames"]
    assert "ddp-rendezvous-etcd.ddp-rendezvous.svc" in names
    service = one(objects, "Service", "ddp-rendezvous-etcd")["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)


def test_a_snapshot_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    """The second container's command, as it stands but for the folder."""
    (template,) = (each for whose, each, _ in rules.pods(built("production")) if whose.startswith("CronJob/"))
    (saves, keeps), (frees,) = template["spec"]["initContainers"], template["spec"]["containers"]
    assert saves["command"][-1] == "/snapshots/new.db"
    assert frees["command"][:3] == ["etcdctl", "defrag", "--cluster"], "if it fails, the snapshot is kept"
    command = [word.replace("/snapshots", str(tmp_path)) for word in keeps["command"]]
    for text in ("older", "newer"):
        (tmp_path / "new.db").write_text(text)
        subprocess.run(command, check=True, timeout=60)
    kept = list(tmp_path.iterdir())
    assert {each.name for each in kept} <= {"0.db", "1.db", "2.db", "3.db"}
    assert any(each.read_text() == "newer" for each in kept)


def test_nothing_asks_for_a_shell_in_an_image_without_one() -> None:
    for whose, template, _ in rules.pods(built("production")):
        for container in rules.containers(template):
            if "etcd" in container["image"]:
                assert container["command"][0] in ("etcd", "etcdctl"), whose


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
    "may be another image tomorrow": lambda o: _pod(o)["containers"][0].update(image="registry:5000/ddp"),
    "nobody makes the priority class": lambda o: o.remove(one(o, "PriorityClass")),
    "nobody makes the claim": lambda o: o.remove(
        one(o, "PersistentVolumeClaim", "ddp-rendezvous-etcd-snapshots")
    ),
    "there is no Issuer": lambda o: o.remove(one(o, "Issuer", "ddp-rendezvous-ca")),
    "its secret holds no CA": lambda o: one(o, "Certificate", "ddp-rendezvous-ca")["spec"].pop("isCA"),
    "is no service's": lambda o: o.remove(one(o, "Service", "ddp-rendezvous-replicas")),
    "speaks plain gRPC": lambda o: _pod(o)["containers"][0].update(livenessProbe={"grpc": {"port": 29400}}),
    "asks port 29401": lambda o: _pod(o)["containers"][0].update(livenessProbe={"grpc": {"port": 29401}}),
    "in two ways": lambda o: _pod(o)["containers"][0]["livenessProbe"].update(grpc={"port": 29400}),
    "no volume of hostPath": lambda o: _pod(o)["volumes"][0].update(hostPath={"path": "/"}),
    "asks for privileges": lambda o: _pod(o)["containers"][0]["securityContext"].update(privileged=True),
    "takes a port of its node": lambda o: _pod(o)["containers"][0]["ports"][0].update(hostPort=29400),
}


@pytest.mark.parametrize("words", BREAKAGES)
def test_a_rule_finds_what_it_is_for(words: str) -> None:
    objects = copy.deepcopy(list(built("production")))
    BREAKAGES[words](objects)
    assert any(words in found for found in rules.broken(objects))
