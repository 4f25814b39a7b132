"""The chart makes what the overlays are; its values do what they say; and nonsense is refused in words."""

from __future__ import annotations

import json
from typing import Any

import charts
import custom_resources
import kubernetes_validate
import pytest
import rules
from serve_settings import parse_serve

helm = pytest.importorskip("helm_python", reason="helm's library is not built for this machine")

NEWEST = "1.37"  # the overlays, which are the same, are held against older ones as well
DIGEST = "sha256:" + "0" * 64
PRODUCTION: dict[str, Any] = {}
DEV = charts.values_of("values-dev.yaml")
ETCD_OF_OTHERS = {
    "store": {
        "etcd": {
            "managed": False,
            "endpoints": ["e0.example.org:2379", "e1.example.org:2379"],
            "secret": "in",
        }
    },
    "networkPolicy": {"etcd": [{"ipBlock": {"cidr": "10.0.0.0/24"}}]},
}
COMBINATIONS: dict[str, dict[str, Any]] = {
    "production": PRODUCTION,
    "dev": DEV,
    "memory": {**DEV, "store": {"kind": "memory"}},
    "etcd of others": ETCD_OF_OTHERS,
    "certificates of others": {
        "tls": {"secret": "server"},
        "etcd": {"tls": {"secret": "members", "clientSecret": "clients"}},
    },
    "an issuer of the company": {"tls": {"issuer": {"name": "pki", "kind": "ClusterIssuer"}}},
    "one replica on etcd, no tokens": {"replicas": 1, "tokens": {"enabled": False}},
    "no monitoring, no policies, no snapshots": {
        "monitoring": {"enabled": False},
        "networkPolicy": {"enabled": False},
        "etcd": {"snapshots": {"enabled": False}},
    },
    "another priority": {"priorityClass": {"create": False, "name": "system-cluster-critical"}},
    "everything else": {
        "image": {"repository": "registry.example.org:5000/ml/ddp-rendezvous", "digest": DIGEST},
        "imagePullSecrets": [{"name": "registry"}],
        "replicas": 5,
        "tokens": {"secret": "keys-of-ours"},
        "monitoring": {"labels": {"release": "prometheus"}},
        "networkPolicy": {"jobs": {"team": "ml"}, "monitoring": {"team": "sre"}},
        "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "2", "memory": "1Gi"}},
        "nodeSelector": {"pool": "services"},
        "tolerations": [{"key": "services", "operator": "Exists"}],
        "podAnnotations": {"note": "of ours"},
        "podLabels": {"team": "ml"},
        "extraEnv": [{"name": "DDP_RENDEZVOUS_HISTORY", "value": "30"}],
        "etcd": {"storage": {"size": "20Gi", "storageClassName": "fast"}, "image": {"digest": DIGEST}},
    },
}
# Made by those who chose such values; a rule asks for them.
GIVEN = {"in", "server", "members", "clients", "keys-of-ours"}


def installed(values: dict[str, Any]) -> list[dict[str, Any]]:
    """In a namespace as deploy/kubernetes has it, which the chart leaves to who installs it."""
    (namespace,) = (each for each in charts.overlay("dev") if each["kind"] == "Namespace")
    secrets = [{"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}} for name in sorted(GIVEN)]
    issuer = {"apiVersion": "cert-manager.io/v1", "kind": "ClusterIssuer", "metadata": {"name": "pki"}}
    return [namespace, issuer, *secrets, *charts.rendered(values)]


def pod(objects: list[dict[str, Any]], name: str = "ddp-rendezvous") -> Any:
    for found in objects:
        if found["kind"] == "StatefulSet" and found["metadata"]["name"] == name:
            return found["spec"]["template"]
    raise AssertionError(f"no set {name}")


@charts.needs_kubectl
@pytest.mark.parametrize(("overlay", "values"), [("production", PRODUCTION), ("dev", DEV)])
def test_the_chart_makes_what_the_overlay_is(overlay: str, values: dict[str, Any]) -> None:
    ours = {rules.name_of(each): charts.comparable(each) for each in charts.rendered(values)}
    theirs = {rules.name_of(each): charts.comparable(each) for each in charts.overlay(overlay)}
    theirs.pop("Namespace/ddp-rendezvous")  # helm cannot own the namespace that it keeps its records in
    assert ours.keys() == theirs.keys()
    for name, found in ours.items():
        assert found == theirs[name], name


@pytest.mark.parametrize("name", COMBINATIONS)
def test_values_make_objects_that_a_cluster_takes(name: str) -> None:
    objects = installed(COMBINATIONS[name])
    assert rules.broken(objects) == []
    for found in objects:
        if found["kind"] in custom_resources.KINDS:
            custom_resources.validate(found)
        elif found["kind"] not in ("Secret", "ClusterIssuer"):
            kubernetes_validate.validate(found, NEWEST, strict=True)


@pytest.mark.parametrize("name", COMBINATIONS)
def test_the_service_starts_on_what_values_say(name: str) -> None:
    """Its own reader of settings takes what the chart sets, and finds it safe, or is told that it need not be."""
    (container,) = pod(charts.rendered(COMBINATIONS[name]))["spec"]["containers"]
    said = {each["name"]: each.get("value", "pod-0") for each in container["env"]}
    said = {
        variable: value.replace("$(POD_NAME)", "pod-0").replace("$(POD_NAMESPACE)", "ns")
        for variable, value in said.items()
    }
    settled = parse_serve(container["args"][1:], said)
    known = {f"DDP_RENDEZVOUS_{setting.upper()}" for setting in settled}
    assert {variable for variable in said if variable.startswith("DDP_RENDEZVOUS")} <= known


def test_the_schema_knows_the_values_and_no_others() -> None:
    schema = json.loads((charts.CHART / "values.schema.json").read_text())

    def agree(values: Any, part: Any, at: str) -> None:
        part = schema["definitions"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part
        if part.get("additionalProperties") is False and at != ".resources":
            assert values.keys() == part["properties"].keys() - {"global", "claims"}, at
            for name, value in values.items():
                agree(value, part["properties"][name], f"{at}.{name}")

    agree(charts.values_of("values.yaml"), schema, "")


def test_values_arrive() -> None:
    values = COMBINATIONS["everything else"]
    objects = charts.rendered(values)
    template = pod(objects)
    spec, (container,) = template["spec"], template["spec"]["containers"]
    assert container["image"] == f"registry.example.org:5000/ml/ddp-rendezvous:0.1.0@{DIGEST}"
    assert container["resources"]["requests"] == {
        **values["resources"]["requests"],
        "ephemeral-storage": "64Mi",
    }
    assert {"name": "DDP_RENDEZVOUS_HISTORY", "value": "30"} in container["env"]
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    for each in (spec, pod(objects, "ddp-rendezvous-etcd")["spec"]):
        assert (each["nodeSelector"], each["tolerations"]) == (values["nodeSelector"], values["tolerations"])
    assert template["metadata"]["labels"]["team"] == "ml"
    assert template["metadata"]["annotations"] == {"note": "of ours"}
    monitors = [each for each in objects if each["apiVersion"].startswith("monitoring.coreos.com")]
    assert len(monitors) == 3
    assert all(each["metadata"]["labels"]["release"] == "prometheus" for each in monitors)
    (sets,) = (each["spec"] for each in objects if rules.name_of(each) == "StatefulSet/ddp-rendezvous")
    assert sets["replicas"] == 5


def test_names_follow_the_namespace() -> None:
    objects = charts.rendered(PRODUCTION, namespace="elsewhere")
    text = str(objects)
    assert ".elsewhere.svc" in text
    assert "ddp-rendezvous.svc" not in text.replace("ddp-rendezvous.elsewhere.svc", "")
    (store,) = (
        each["value"]
        for each in pod(objects)["spec"]["containers"][0]["env"]
        if each["name"] == "DDP_RENDEZVOUS_STORE"
    )
    assert store.count(".elsewhere.svc:2379") == 3


def test_an_etcd_of_others_is_reached_and_none_is_made() -> None:
    objects = charts.rendered(ETCD_OF_OTHERS)
    assert not any("ddp-rendezvous-etcd" in each["metadata"]["name"] for each in objects)
    (store,) = (
        each["value"]
        for each in pod(objects)["spec"]["containers"][0]["env"]
        if each["name"] == "DDP_RENDEZVOUS_STORE"
    )
    assert store.startswith("etcd://e0.example.org:2379,e1.example.org:2379/ddp-rendezvous?tls=true&")
    assert "Etcd" not in str([each for each in objects if each["kind"] == "PrometheusRule"])
    assert "EtcdQuorumAtRisk" in str(charts.rendered(PRODUCTION))
    (way,) = (each["spec"] for each in objects if each["metadata"]["name"] == "ddp-rendezvous-to-etcd")
    assert way["egress"] == [{"to": [{"ipBlock": {"cidr": "10.0.0.0/24"}}], "ports": [{"port": 2379}]}]


NONSENSE: list[tuple[dict[str, Any], str]] = [
    ({"replicas": 2, "store": {"kind": "memory"}}, "store.kind: memory supports only one replica"),
    ({"replicas": 3, "store": {"kind": "file"}}, "Set store.kind: etcd, or replicas: 1"),
    ({"tls": {"enabled": False}}, "insecure: true on a cluster that you do not share"),
    ({"tls": {"secret": "a", "issuer": {"name": "b"}}}, "Leave one of them empty"),
    ({**DEV, "tls": {"enabled": False, "secret": "a"}}, "have no effect while tls.enabled is false"),
    ({"store": {"etcd": {"endpoints": ["a:1"]}}}, "Set store.etcd.managed: false"),
    ({"store": {"etcd": {"managed": False}}}, "the service has no etcd"),
    ({"store": {"etcd": {"managed": False, "endpoints": ["a:1"]}}}, "can rewrite every job"),
    (
        {"store": {"etcd": {"managed": False, "endpoints": ["a:1"], "secret": "s"}}},
        "networkPolicy.etcd is empty",
    ),
    (
        {**DEV, "store": {"kind": "file", "etcd": {"endpoints": ["a:1"]}}},
        "has no effect while store.kind is file",
    ),
    ({"etcd": {"tls": {"secret": "x"}}}, "Set both"),
    ({"priorityClass": {"name": ""}}, "priorityClass.name is empty"),
    (
        {"extraEnv": [{"name": "DDP_RENDEZVOUS_STORE", "value": "memory"}]},
        "Set the values of `store` instead",
    ),
    (
        {"extraEnv": [{"name": "DDP_RENDEZVOUS_LISTEN", "value": "0.0.0.0:1"}]},
        "services and probes depend on it",
    ),
    # From here on it is the schema that speaks.
    ({"replica": 2}, "additional properties 'replica' not allowed"),
    ({"replicas": 0}, "/replicas"),
    ({"replicas": "3"}, "/replicas"),
    ({"store": {"kind": "redis"}}, "/store/kind"),
    ({"image": {"digest": "sha256:12"}}, "/image/digest"),
    ({"image": {"repository": "ddp-rendezvous:0.1.0"}}, "/image/repository"),
    ({"networkPolicy": {"jobs": {"ddp-launch/jobs": None}}}, "/networkPolicy/jobs"),
    ({"networkPolicy": {"dns": []}}, "/networkPolicy/dns"),
    ({"extraEnv": [{"name": "A", "value": 1}]}, "/extraEnv/0/value"),
    ({"etcd": {"initialClusterState": "old"}}, "/etcd/initialClusterState"),
]


@pytest.mark.parametrize(("values", "words"), NONSENSE, ids=[words for _, words in NONSENSE])
def test_nonsense_is_refused_in_words(values: dict[str, Any], words: str) -> None:
    with pytest.raises(helm.HelmError) as caught:
        charts.rendered(values)
    assert words in str(caught.value)


def test_helm_finds_no_fault() -> None:
    for values in (PRODUCTION, DEV):
        report = helm.lint(charts.CHART, values, strict=True, namespace="ddp-rendezvous")
        assert [each for each in report["messages"] if each["severity"] >= 2] == []
        assert not report["errors"]
