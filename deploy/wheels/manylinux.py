"""Which manylinux tag a compiled module may have: what `readelf` says of the versions of symbols that it needs.

A tag `manylinux_2_N_MACHINE` promises that glibc 2.N suffices and that only libraries are needed which every system
has. The check of auditwheel is the same; this one also works for the machines that we only compile for.
"""

from __future__ import annotations

import re
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

OLDEST = (2, 17)  # the oldest that an installer still asks for, as manylinux2014
_ALIASES = {OLDEST: "manylinux2014"}
_EVERYWHERE = re.compile(r"(libc|libpthread|libdl|libm)\.so\.\d+|ld-linux-[\w-]+\.so\.\d")


class NotPortable(ValueError):
    """A module needs something that the tag does not promise."""


def needs(module: Path) -> tuple[set[str], set[str]]:
    """The libraries, and the versions of symbols (`GLIBC_2.17`)."""
    words = ["readelf", "--wide", "--dynamic", "--version-info", str(module)]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return libraries_and_versions(text)


def libraries_and_versions(text: str) -> tuple[set[str], set[str]]:
    libraries = set(re.findall(r"\(NEEDED\).*\[(.+?)\]", text))
    return libraries, set(re.findall(r"Name: ([A-Z]\w*_[\d.]+)\s+Flags", text))


def moved_symbols(module: Path) -> set[str]:
    """The functions that it takes in a version which is newer than the oldest glibc: old_glibc.h has to name them."""
    words = ["readelf", "--wide", "--dyn-syms", str(module)]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    found = re.findall(r" UND (\w+)@GLIBC_(\d+)\.(\d+)", text)
    return {name for name, major, minor in found if (int(major), int(minor)) > OLDEST}


def glibc_of(libraries: Iterable[str], versions: Iterable[str]) -> tuple[int, int]:
    """The oldest glibc that suffices. Raises `NotPortable`."""
    if strange := sorted(each for each in libraries if not _EVERYWHERE.fullmatch(each)):
        raise NotPortable(f"needs {', '.join(strange)}, which not every system has")
    needed = [OLDEST]
    for each in versions:
        found = re.fullmatch(r"GLIBC_(\d+)\.(\d+)(?:\.\d+)?", each)
        if not found:
            raise NotPortable(f"needs {each}, which glibc does not have")
        needed.append((int(found[1]), int(found[2])))
    return max(needed)


def platform_tag(glibc: tuple[int, int], machine: str) -> str:
    """As it stands in the name of a wheel; with the older name of the tag where there is one."""
    names = [f"manylinux_{glibc[0]}_{glibc[1]}", *([_ALIASES[glibc]] if glibc in _ALIASES else [])]
    return ".".join(f"{name}_{machine}" for name in sorted(names))
