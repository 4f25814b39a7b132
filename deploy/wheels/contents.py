"""What has to be in a release, and what may not: modules, the core, pages, metadata, the licence, sizes."""

from __future__ import annotations

import re
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("launcher", "rendezvous", "ddp", "ddp_launch_wings")
ENTRY = "_ddp_launch_entry.py"
_TABLE = "ddp_launch_wings/entry_points.txt"
LARGEST = 2_000_000  # the page has 60 kB of it, the manual 160 kB
_CORE = {
    "ddp/groups/_native.abi3.so",
    "ddp/elastic/_bulk_copy.abi3.so",
    "ddp/elastic/_checksum.abi3.so",
    "ddp_launch_wings/redundancy/_erasure.abi3.so",
    "ddp/reducer/_arrivals.abi3.so",
    "ddp/telemetry/_ending.abi3.so",
    "ddp/telemetry/_page.abi3.so",
}
_PAGE = ROOT / "ddp_launch_wings" / "web" / "static"  # what a browser loads
_IN_SOURCES = (
    ENTRY,
    _TABLE,
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "PKG-INFO",
)


def check(path: Path) -> None:
    """Ends the program if something is wrong."""
    problems = problems_of_wheel(path) if path.suffix == ".whl" else problems_of_sources(path)
    if problems:
        sys.exit("\n  ".join((f"{path.name}:", *problems)))


def problems_of_wheel(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        metadata = next(archive.read(each).decode() for each in names if each.endswith(".dist-info/METADATA"))
        licences = [archive.read(each) for each in names if each.endswith("/licenses/LICENSE")]
    inside = {name for name in names if ".dist-info/" not in name}
    problems = [f"{name} is missing" for name in sorted(_expected(pure="-none-any" in path.name) - inside)]
    problems += [
        f"{name} does not belong there"
        for name in sorted(inside)
        if not name.startswith((ENTRY, *(f"{package}/" for package in PACKAGES)))
        or not (
            name.endswith((".py", ".pyi", ".md", ".so", "/py.typed")) or name in (_TABLE, *_of_the_page())
        )
        or (name.endswith(".so") and name not in _CORE)
    ]
    if "-none-any" in path.name and inside & _CORE:
        problems.append("a wheel for all machines has compiled modules")
    if licences != [(ROOT / "LICENSE").read_bytes()]:
        problems.append("the licence is not that of the project")
    if path.stat().st_size > LARGEST:
        problems.append(f"{path.stat().st_size:,} bytes are more than {LARGEST:,}")
    return problems + problems_of_metadata(metadata)


def _expected(*, pure: bool) -> set[str]:
    modules = {str(path.relative_to(ROOT)) for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    pages = {f"launcher/pages/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    typed = {f"{name}/py.typed" for name in PACKAGES}
    return {ENTRY, _TABLE} | modules | pages | typed | _of_the_page() | (set() if pure else _CORE)


def _of_the_page() -> set[str]:
    return {str(path.relative_to(ROOT)) for path in _PAGE.rglob("*") if path.is_file()}


def problems_of_sources(path: Path) -> list[str]:
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        metadata = next(each for each in archive.getmembers() if re.fullmatch(r"[^/]+/PKG-INFO", each.name))
        file = archive.extractfile(metadata)
        text = file.read().decode() if file else ""
    wanted = {*_IN_SOURCES, *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))}
    for name in PACKAGES:
        found = [path for end in ("*.py", "*.c", "*.h") for path in (ROOT / name).rglob(end)]
        wanted |= {str(path.relative_to(ROOT)) for path in found}
    wanted |= _of_the_page()
    problems = [f"{name} is missing" for name in sorted(wanted - names)]
    problems += [f"{name} does not belong there" for name in sorted(names) if name.endswith((".so", ".pyc"))]
    return problems + problems_of_metadata(text)


def problems_of_metadata(text: str) -> list[str]:
    """Whether the metadata says what pyproject.toml says."""
    said = Parser().parsestr(text)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {
        "Name": project["name"],
        "Version": project["version"],
        "Requires-Python": project["requires-python"],
        "License-Expression": project["license"],
        "License-File": "LICENSE",
        "Description-Content-Type": "text/markdown",
    }
    problems = [
        f"metadata: {key} is {said[key]!r}, not {each!r}" for key, each in wanted.items() if said[key] != each
    ]
    needs = {re.sub(r"\s", "", each) for each in said.get_all("Requires-Dist", []) if "extra" not in each}
    if needs != {re.sub(r"\s", "", each) for each in project["dependencies"]}:
        problems.append(f"metadata: requires {sorted(needs)}")
    if not said.get_payload():
        problems.append("metadata: no description")
    return problems
