"""`make audit`: is what gets installed what we mean, and does anybody know something against it?

First what can be told from the tree alone: every pin is one version with hashes, the lock fits pyproject.toml, the
images install from it, and each licence is known and allowed where it is shipped. Then the advisories: of a service
that is asked over the network (pip-audit and OSV), or of a copy of OSV's records (ADVISORIES=all.zip, a zip or a folder
of JSON, which https://osv.dev hands out for each ecosystem).

Exit code: 0 nothing, 1 something was found, 3 nobody could be asked about advisories.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import advisories
import lock
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from lock import Pins

CLEAN, FOUND, NOT_ASKED = 0, 1, 3
POLICY = lock.HERE / "policy.toml"
HASH = re.compile(r"sha256:[0-9a-f]{64}")
VERSION = re.compile(r"\d[\w.+!]*")
INSTALLED = ("torch.txt", "install.txt", "cuda.txt", "test.txt", "bench.txt")
_ASKING_S = 300


def locked() -> dict[str, Pins]:
    """By the name of the file, from the root."""
    paths = (*sorted(lock.HERE.glob("*.txt")), lock.SERVICE)
    return {str(path.relative_to(lock.ROOT)): lock.read(path.read_text()) for path in paths}


def project() -> Mapping[str, Any]:
    return tomllib.loads((lock.ROOT / "pyproject.toml").read_text())


def policy() -> Mapping[str, Any]:
    return tomllib.loads(POLICY.read_text())


# --- what the tree says --------------------------------------------------------------------------------


def unpinned(files: Mapping[str, Pins]) -> list[str]:
    """Pins that are ranges, or whose files may be anything."""
    return [
        f"{file}: {pin.name} {pin.version or '(no version)'}: not one version with the hashes of its files"
        for file, pins in files.items()
        for pin in pins.values()
        if not VERSION.fullmatch(pin.version) or not pin.hashes or not all(map(HASH.fullmatch, pin.hashes))
    ]


def differing(files: Mapping[str, Pins]) -> list[str]:
    """Versions in the image's file that are not those which are tested."""
    tested = {
        key: set(pin.hashes) for name in INSTALLED for key, pin in files[f"requirements/{name}"].items()
    }
    service = str(lock.SERVICE.relative_to(lock.ROOT))
    return [
        f"{service}: {pin.name} {pin.version} is not what the lock has"
        for key, pin in files[service].items()
        if tested.get(key) != set(pin.hashes)
    ]


def uncovered(files: Mapping[str, Pins], asked_for: Mapping[str, Any]) -> list[str]:
    """What pyproject.toml asks for and the lock does not have."""
    pins = [pin for name in INSTALLED for pin in files[f"requirements/{name}"].values()]
    wanted = [*asked_for["project"]["dependencies"], *asked_for["build-system"]["requires"]]
    for extra in asked_for["project"]["optional-dependencies"].values():
        wanted += extra
    found = []
    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        if not any(pin.name == name and requirement.specifier.contains(pin.version, True) for pin in pins):
            found.append(f"pyproject.toml: {requirement} is not in the lock; make lock")
    return found


def images_unlocked(dockerfiles: Mapping[str, str]) -> list[str]:
    """Commands that install from an index and check no hash; bases that the one who builds cannot name by digest."""
    found = []
    for name, text in dockerfiles.items():
        for command in re.split(r"&&|^RUN", text.replace("\\\n", " "), flags=re.MULTILINE):
            fetches = re.search(r"pip (install|wheel|download)\b", command)
            if fetches and not re.search(r"--require-hashes|--no-index|--no-deps", command):
                found.append(f"{name}: {' '.join(command.split())[:80]}: no hashes")
        bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
        found += [f"{name}: FROM {base}: named here, without a digest" for base in bases if "${" not in base]
    return found


def licences_unknown(files: Mapping[str, Pins], agreed: Mapping[str, Any]) -> list[str]:
    known = agreed["licences"]
    shipped, cuda = known["shipped"], known["cuda"]
    everything = shipped | cuda | known["home"]
    found = []
    for file, pins in files.items():
        if file.endswith("lint.txt"):
            continue  # a program that looks at files of ours, and is part of nothing
        allowed = everything
        if file.endswith(("torch.txt", "torch-cpu.txt", "install.txt", "service.requirements.txt")):
            allowed = shipped
        elif file.endswith("cuda.txt"):
            allowed = cuda
        strange = (pin.name for pin in pins.values() if pin.name not in allowed)
        found += [f"{file}: {name}: its licence is not in policy.toml" for name in strange]
    for name, licence in shipped.items():
        if licence not in agreed["allowed"]:
            found.append(f"policy.toml: {name}: {licence} is not allowed")
        if words := _says_otherwise(name, licence):
            found.append(words)
    return found


def _says_otherwise(name: str, licence: str) -> str:
    """What an installed package says of itself, where it says so in the form that is meant for machines."""
    try:
        own = metadata(name).get("License-Expression")
    except PackageNotFoundError:
        return ""
    return f"policy.toml: {name}: it says {own}, not {licence}" if own and own != licence else ""


def from_the_tree() -> list[str]:
    files = locked()
    dockerfiles = {path.name: path.read_text() for path in sorted(lock.SERVICE.parent.glob("*Dockerfile"))}
    return [
        *unpinned(files),
        *differing(files),
        *uncovered(files, project()),
        *images_unlocked(dockerfiles),
        *licences_unknown(files, policy()),
    ]


# --- what others know --------------------------------------------------------------------------------------


def asked(pip_audit: str) -> list[str]:
    """Raises `NotAsked`."""
    words = [pip_audit, "--vulnerability-service", "osv", "--format", "json", "--progress-spinner", "off"]
    words += ["--require-hashes", "--disable-pip", "--timeout", "15"]
    for name in INSTALLED:
        words += ["-r", str(lock.HERE / name)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_ASKING_S, check=False)
        told = json.loads(done.stdout)["dependencies"]
    except (OSError, subprocess.TimeoutExpired) as error:
        raise advisories.NotAsked(str(error)) from error
    except (ValueError, KeyError, TypeError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise advisories.NotAsked(last.rpartition("Caused by ")[2].strip("()")[:200]) from None
    skipped = [each["name"] for each in told if "skip_reason" in each]
    if skipped:  # pip-audit itself calls that a success
        raise advisories.NotAsked(f"no word on {', '.join(skipped[:5])} and {len(skipped)} in all")
    return [
        f"{each['name']} {each['version']}: {vulnerability['id']}"
        for each in told
        for vulnerability in each["vulns"]
        if not set(policy()["accepted"]) & {vulnerability["id"], *vulnerability["aliases"]}
    ]


def _told(what: str, found: Iterable[str]) -> int:
    lines = list(found)
    print(f"{what}: {len(lines)} found" if lines else f"{what}: nothing found")
    for line in lines:
        print(f"  {line}")
    return FOUND if lines else CLEAN


def main(pip_audit: str, records: str) -> int:
    code = _told("the tree (pins, hashes, images, licences)", from_the_tree())
    try:
        if records:
            pins = [pin for name in INSTALLED for pin in locked()[f"requirements/{name}"].values()]
            known = advisories.about(advisories.read(Path(records)), pins, set(policy()["accepted"]))
        else:
            known = asked(pip_audit)
    except advisories.NotAsked as error:
        print(f"advisories: nobody could be asked ({error})")
        print(
            "  make audit ADVISORIES=all.zip asks a copy of OSV's records for PyPI instead; docs/supply-chain.md"
        )
        return code or NOT_ASKED
    return max(code, _told("advisories", known))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""))
