"""Validates objects that cert-manager and the Prometheus operator read, by the schemas of custom_resources.yaml."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

_SCHEMAS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
KINDS = frozenset(_SCHEMAS["kinds"])


@cache
def _validator(kind: str) -> jsonschema.Draft202012Validator:
    of_kind = _SCHEMAS["kinds"][kind]
    properties = {
        "apiVersion": {"const": of_kind["apiVersion"]},
        "kind": {"const": kind},
        "metadata": _SCHEMAS["metadata"],
        "spec": of_kind["spec"],
    }
    whole = {"type": "object", "required": [*properties], "properties": properties}
    return jsonschema.Draft202012Validator({**whole, "additionalProperties": False})


def validate(found: dict[str, Any]) -> None:
    """Raises `jsonschema.ValidationError`; `KeyError` for a kind that is none of these."""
    _validator(found["kind"]).validate(found)
