"""Unpacks packages of Debian for another machine or of an older release. This system stays as it is."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PROGRAMS = ("apt-get", "dpkg-deb")


class Unavailable(Exception):
    """The packages cannot be fetched."""


def unpack(folder: Path, architecture: str, packages: tuple[str, ...], suite: str = "") -> Path:
    """The packages and what they need, in `folder`/root. `suite`: of which release, if not of this system's."""
    root = folder / "root"
    if root.exists():
        return root
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("state/lists/partial", "cache/archives/partial", "parts", "unpacked"):
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()
    settings = {
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        "APT::Sandbox::User": "root",
        "Dir::State": str(folder / "state"),
        "Dir::State::status": str(folder / "status"),
        "Dir::Cache": str(folder / "cache"),
        "Debug::NoLocking": "1",
    }
    if suite:
        key = "/usr/share/keyrings/debian-archive-keyring.gpg"
        (folder / "sources.list").write_text(f"deb [signed-by={key}] {_mirror()} {suite} main\n")
        settings |= {"Dir::Etc::sourcelist": str(folder / "sources.list")}
        settings |= {"Dir::Etc::sourceparts": str(folder / "parts")}
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
    install = ("install", "-y", "--no-install-recommends", "--download-only", *packages)
    for words in (("update",), install):
        done = subprocess.run([*apt, *words], capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unavailable(f"apt-get {words[0]}: {done.stderr.strip()[-300:]}")
    for package in sorted((folder / "cache/archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", str(package), str(folder / "unpacked")], check=True)
    (folder / "unpacked").rename(root)
    return root


def _mirror() -> str:
    """Where this system takes Debian's packages from."""
    words = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Label: Debian", "Created-By: Packages"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[0]
