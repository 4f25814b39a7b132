"""Schemas of what cert-manager and the Prometheus operator read: the part of their APIs that our manifests use.

Written by hand, so that a field that is misspelt, or that we have never used before, is refused until somebody has
looked it up. All that is allowed here was held against the definitions that both projects had published by August 2026.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jsonschema

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string", "minLength": 1}
_SPAN = {"type": "string", "pattern": r"^(\d+w)?(\d+d)?(\d+h)?(\d+m)?(\d+s)?(\d+ms)?$", "minLength": 2}
_HOURS = {"type": "string", "pattern": r"^\d+h(\d+m)?$"}  # as Go reads it: it knows no days
_LABELS = {"type": "object", "additionalProperties": {"type": "string"}}


def _object(required: str, **properties: Schema) -> Schema:
    return {
        "type": "object",
        "required": required.split(),
        "properties": properties,
        "additionalProperties": False,
    }


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


_SELECTOR = _object("matchLabels", matchLabels=_LABELS)
_USAGES = {"enum": ["server auth", "client auth", "digital signature"]}

_SPECS: dict[str, tuple[str, Schema]] = {
    "Certificate": (
        "cert-manager.io/v1",
        _object(
            "secretName commonName issuerRef privateKey duration renewBefore",
            secretName=_TEXT,
            commonName={"type": "string", "minLength": 1, "maxLength": 64},
            dnsNames=_list({"type": "string", "pattern": r"^(\*\.)?[a-z0-9.-]+$"}),
            ipAddresses=_list({"type": "string", "pattern": r"^[0-9.]+$"}),
            isCA={"type": "boolean"},
            usages=_list(_USAGES),
            duration=_HOURS,
            renewBefore=_HOURS,
            privateKey=_object(
                "algorithm size rotationPolicy",
                algorithm={"enum": ["RSA", "ECDSA", "Ed25519"]},
                size={"enum": [256, 384, 521, 2048, 4096, 8192]},
                rotationPolicy={"enum": ["Never", "Always"]},
            ),
            issuerRef=_object(
                "name kind group", name=_TEXT, kind={"enum": ["Issuer", "ClusterIssuer"]}, group=_TEXT
            ),
        ),
    ),
    "Issuer": (
        "cert-manager.io/v1",
        {
            "oneOf": [
                _object("selfSigned", selfSigned=_object("")),
                _object("ca", ca=_object("secretName", secretName=_TEXT)),
            ]
        },
    ),
    "ServiceMonitor": (
        "monitoring.coreos.com/v1",
        _object(
            "selector endpoints",
            selector=_SELECTOR,
            endpoints=_list(_object("port", port=_TEXT, path=_TEXT, interval=_SPAN)),
        ),
    ),
    "PodMonitor": (
        "monitoring.coreos.com/v1",
        _object(
            "selector podMetricsEndpoints",
            selector=_SELECTOR,
            podMetricsEndpoints=_list(_object("port", port=_TEXT, path=_TEXT, interval=_SPAN)),
        ),
    ),
    "PrometheusRule": (
        "monitoring.coreos.com/v1",
        _object(
            "groups",
            groups=_list(
                _object(
                    "name rules",
                    name=_TEXT,
                    rules=_list(
                        _object(
                            "alert expr for labels annotations",
                            **{"alert": _TEXT, "expr": _TEXT, "for": _SPAN},
                            labels=_LABELS,
                            annotations=_LABELS,
                        )
                    ),
                )
            ),
        ),
    ),
}
KINDS = frozenset(_SPECS)
_METADATA = _object("name", name=_TEXT, namespace=_TEXT, labels=_LABELS)


@cache
def _validator(kind: str) -> jsonschema.Draft202012Validator:
    version, spec = _SPECS[kind]
    whole = _object(
        "apiVersion kind metadata spec",
        apiVersion={"const": version},
        kind={"const": kind},
        metadata=_METADATA,
        spec=spec,
    )
    return jsonschema.Draft202012Validator(whole)


def validate(found: dict[str, Any]) -> None:
    """Raises `jsonschema.ValidationError`; `KeyError` for a kind that is none of these."""
    _validator(found["kind"]).validate(found)
