"""Builds what is released into dist/: `make dist`.

    ddp_launch-V.tar.gz                           the sources; the wheels are built from it, so it suffices
    ddp_launch-V-cp311-abi3-manylinux...whl       x86-64, and arm64 if its compiler is here
    ddp_launch-V-py3-none-any.whl                 without the compiled core, for all other machines
    SHA256SUMS, ddp-launch.provenance.json        what they are and what they were made of

Everything is built twice, in different folders, and has to come out the same. Needs no network. What goes in are the
files that git knows, as they are in the working tree.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

import archives
import contents
import manylinux
import provenance

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DIST = ROOT / "dist"
_BACKEND = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"


@dataclass(frozen=True, slots=True)
class Target:
    machine: str  # "": pure Python
    compiler: str = ""

    @property
    def is_here(self) -> bool:
        return not self.compiler or shutil.which(self.compiler) is not None


TARGETS = (Target("x86_64", "x86_64-linux-gnu-gcc"), Target("aarch64", "aarch64-linux-gnu-gcc"), Target(""))


def main() -> None:
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or _git("log", "-1", "--format=%ct"))
    targets = [each for each in TARGETS if each.is_here]
    os.umask(0o022)
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory(suffix="-again") as second:
        made = build(Path(first), epoch, targets)
        again = build(Path(second), epoch, targets)
        differing = [one.name for one, other in zip(made, again, strict=True) if not _same(one, other)]
        if differing:
            sys.exit(f"not reproducible: {', '.join(differing)} came out in two ways")
        for path in made:
            contents.check(path)
        DIST.mkdir(exist_ok=True)
        for old in (*DIST.glob("*.whl"), *DIST.glob("*.tar.gz")):
            old.unlink()
        released = [Path(shutil.copy(path, DIST)) for path in made]
    provenance.write(DIST, released, ROOT, epoch)
    for path in released:
        print(f"dist/{path.name}  {path.stat().st_size / 1e6:.2f} MB")
    for target in TARGETS:
        if not target.is_here:
            print(f"no wheel for {target.machine}: {target.compiler} is not installed")


def build(folder: Path, epoch: int, targets: list[Target]) -> list[Path]:
    source = _exported(folder / "source")
    out = folder / "out"
    out.mkdir()
    sdist = out / _backend("build_sdist", out, source, dict(os.environ))
    archives.normalise_sdist(sdist, epoch)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return [sdist, *(_wheel(each, unpacked, folder, epoch) for each in targets)]


def _exported(to: Path) -> Path:
    for name in _git("ls-files", "-z").split("\0"):
        path = ROOT / name
        if name and path.is_file() and not path.is_symlink():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, to / name)
    return to


def _wheel(target: Target, unpacked: Path, folder: Path, epoch: int) -> Path:
    named = target.machine or "pure"
    source, raw = folder / named, folder / f"{named}-raw"
    shutil.copytree(unpacked, source)
    raw.mkdir()
    wheel = raw / _backend("build_wheel", raw, source, _environment(target, source, epoch))
    if not target.machine:
        return archives.normalise_wheel(wheel, "any", epoch, folder / "out")
    glibc = manylinux.OLDEST
    for module in sorted((source / "build").rglob(f"{_lib(target)}/**/*.so")):
        glibc = max(glibc, manylinux.glibc_of(*manylinux.needs(module)))
        if moved := manylinux.moved_symbols(module):
            sys.exit(
                f"{module.name} needs a newer glibc for {', '.join(sorted(moved))}: enter them in old_glibc.h"
            )
    return archives.normalise_wheel(
        wheel, manylinux.platform_tag(glibc, target.machine), epoch, folder / "out"
    )


def _lib(target: Target) -> str:
    return f"lib.linux-{target.machine}*"


def _environment(target: Target, source: Path, epoch: int) -> dict[str, str]:
    given = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch), "LC_ALL": "C"}
    for name in ("CFLAGS", "CPPFLAGS", "LDFLAGS", "ARCHFLAGS"):
        given.pop(name, None)
    if not target.machine:
        return given | {"DDP_LAUNCH_CORE": "0"}
    # No paths and no debug information of this machine; symbols in the versions of an old glibc.
    flags = f"-g0 -ffile-prefix-map={source}=. -include {HERE / 'old_glibc.h'}"
    return given | {
        "DDP_LAUNCH_CORE": "required",
        "CC": target.compiler,
        "LDSHARED": f"{target.compiler} -shared",
        "CFLAGS": flags,
        "LDFLAGS": "-Wl,-s -Wl,--build-id=none",
        "_PYTHON_HOST_PLATFORM": f"linux-{target.machine}",
    }


def _backend(hook: str, out: Path, source: Path, environment: dict[str, str]) -> str:
    command = [sys.executable, "-W", "ignore", "-c", _BACKEND, hook, str(out)]
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{hook} failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout.splitlines()[-1]


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def _same(one: Path, other: Path) -> bool:
    return one.name == other.name and one.read_bytes() == other.read_bytes()


if __name__ == "__main__":
    if "Linux" not in sysconfig.get_platform().title() and sys.platform != "linux":
        sys.exit("wheels are built on Linux")
    main()
