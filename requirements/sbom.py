"""Bills of materials (CycloneDX 1.6), made of the lock: `make sbom`.

    deploy/docker/service.sbom.json    what the image of the service holds beside its base; it is built into the image
    dist/ddp-launch.sbom.json          the wheel with what `make install` installs; torch and its own are optional

Versions and hashes are those of the lock, licences those of policy.toml; who needs whom is what the installed packages
say. There is no time and no number of its own in them: the first is committed, and a test makes it again.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import PackageNotFoundError, requires
from typing import TYPE_CHECKING, Any

import lock
from audit import policy, project
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from lock import Pin

IMAGE = lock.SERVICE.parent / "service.sbom.json"
WHEEL = lock.ROOT / "dist" / "ddp-launch.sbom.json"
_NOT_IN_THE_IMAGE = "setuptools"  # builds the wheel, and is gone before the image is done


def purl(name: str, version: str) -> str:
    return f"pkg:pypi/{name}@{version.replace('+', '%2B')}"


def bill(kind: str, name: str, pins: Iterable[Pin], optional: Iterable[Pin] = ()) -> dict[str, Any]:
    """`kind`: what the whole is; its own part is always ddp-launch."""
    needed, perhaps = list(pins), list(optional)
    version = project()["project"]["version"]
    own = purl("ddp-launch", version)
    parts = [_part(pin, "required") for pin in needed] + [_part(pin, "optional") for pin in perhaps]
    licence = [{"license": {"id": project()["project"]["license"]}}]
    itself = {"type": "application", "bom-ref": own, "name": "ddp-launch", "version": version, "purl": own}
    whole = itself | {"licenses": licence}
    if kind == "container":
        whole = {"type": kind, "bom-ref": name, "name": name, "version": version}
        parts.insert(0, itself | {"licenses": licence})
    refs = {pin.name: purl(pin.name, pin.version) for pin in (*needed, *perhaps)}
    graph = {own: _refs(_direct(), refs)} | {refs[each]: _refs(_needs(each, perhaps), refs) for each in refs}
    if kind == "container":
        graph[name] = [own]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": whole},
        "components": sorted(parts, key=lambda each: str(each["bom-ref"])),
        "dependencies": [{"ref": ref, "dependsOn": graph[ref]} for ref in sorted(graph)],
    }


def _part(pin: Pin, scope: str) -> dict[str, Any]:
    ref = purl(pin.name, pin.version)
    hashes = [{"alg": "SHA-256", "content": each.partition(":")[2]} for each in pin.hashes]
    licence = _licences()[pin.name]
    return {
        "type": "library",
        "bom-ref": ref,
        "name": pin.name,
        "version": pin.version,
        "scope": scope,
        "licenses": [{"expression": licence}],
        "purl": ref,
        # One for each file of this version: which of them was installed depends on the machine.
        "externalReferences": [{"type": "distribution", "url": ref, "hashes": hashes}],
    }


def _licences() -> Mapping[str, str]:
    known = policy()["licences"]
    return {**known["cuda"], **known["shipped"]}


def _direct() -> set[str]:
    return {canonicalize_name(Requirement(each).name) for each in project()["project"]["dependencies"]} | {
        "torch"
    }


def _needs(name: str, perhaps: Iterable[Pin]) -> set[str]:
    """What an installed package says; and torch, of its CUDA builds, that it needs all that comes with these."""
    try:
        said = [Requirement(each) for each in requires(name) or ()]
    except PackageNotFoundError:
        said = []
    found = {canonicalize_name(each.name) for each in said if "extra" not in str(each.marker or "")}
    if name == "torch":
        found |= {pin.name for pin in perhaps if pin.name.startswith(lock.FOR_CUDA)}
    return found


def _refs(names: Iterable[str], refs: Mapping[str, str]) -> list[str]:
    return sorted(refs[name] for name in names if name in refs)


def bills() -> dict[Path, dict[str, Any]]:
    def pins(path: Path) -> dict[str, Pin]:
        return {pin.name: pin for pin in lock.read(path.read_text()).values()}

    service = pins(lock.SERVICE)
    service.pop(_NOT_IN_THE_IMAGE)
    rest = [
        each for file in ("torch.txt", "install.txt", "cuda.txt") for each in pins(lock.HERE / file).values()
    ]
    optional = [pin for pin in rest if pin.name not in service]
    return {
        IMAGE: bill("container", "ddp-rendezvous", service.values()),
        WHEEL: bill("application", "ddp-launch", service.values(), optional),
    }


def text(made: Mapping[str, Any]) -> str:
    return json.dumps(made, indent=1) + "\n"


if __name__ == "__main__":
    for path, made in bills().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text(made))
        sys.stdout.write(f"{path.relative_to(lock.ROOT)}: {len(made['components'])} components\n")
