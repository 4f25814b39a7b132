"""OSV's records of vulnerabilities, as files -> which of our pins they are about. https://ossf.github.io/osv-schema/"""

from __future__ import annotations

import json
import zipfile
from typing import TYPE_CHECKING, Any

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from lock import Pin

Record = dict[str, Any]


class NotAsked(Exception):
    """In words: why nothing is known."""


def read(place: Path) -> Iterator[Record]:
    """A zip, a folder, or one file. Raises `NotAsked`."""
    try:
        if place.is_dir():
            texts: Iterable[bytes] = (path.read_bytes() for path in sorted(place.rglob("*.json")))
        elif zipfile.is_zipfile(place):
            archive = zipfile.ZipFile(place)
            texts = (archive.read(name) for name in sorted(archive.namelist()) if name.endswith(".json"))
        else:
            texts = [place.read_bytes()]
        found = [json.loads(text) for text in texts]
    except (OSError, ValueError) as error:
        raise NotAsked(f"{place}: {error}") from error
    if not found:
        raise NotAsked(f"{place} holds no records")
    yield from found


def about(records: Iterable[Record], pins: Iterable[Pin], accepted: set[str]) -> list[str]:
    """In words, one for each pin and record."""
    ours: dict[str, list[Pin]] = {}
    for pin in pins:
        ours.setdefault(pin.name, []).append(pin)
    found = set()
    for record in records:
        known_as = {record["id"], *record.get("aliases", ())}
        if "withdrawn" not in record and not known_as & accepted:
            summary = f"{record['id']}: {record.get('summary', '')}".rstrip(": ")
            found |= {f"{pin.name} {pin.version}: {summary}" for pin in _concerned(record, ours)}
    return sorted(found)


def _concerned(record: Record, ours: Mapping[str, list[Pin]]) -> Iterator[Pin]:
    for affected in record.get("affected", ()):
        package = affected.get("package", {})
        if package.get("ecosystem") == "PyPI":
            for pin in ours.get(canonicalize_name(package["name"]), ()):
                if concerns(affected, pin.version):
                    yield pin


def concerns(affected: Mapping[str, Any], text: str) -> bool:
    if text in affected.get("versions", ()):
        return True
    version = Version(text)
    return any(
        _within(each.get("events", ()), version)
        for each in affected.get("ranges", ())
        if each.get("type") == "ECOSYSTEM"
    )


def _within(events: Iterable[Mapping[str, str]], version: Version) -> bool:
    """Events in the order of their versions switch it on and off; "0" is before all."""
    inside = False
    for event in sorted(events, key=_place):
        ((kind, text),) = event.items()
        at = _version(text)
        if kind == "introduced" and at <= version:
            inside = True
        elif (kind == "fixed" and at <= version) or (kind == "last_affected" and at < version):
            inside = False
    return inside


def _place(event: Mapping[str, str]) -> tuple[Version, bool]:
    ((kind, text),) = event.items()
    return _version(text), kind != "introduced"


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        return Version("0")
