"""`make gpu-bundle`: wheels for `make gpu` on a machine that has torch, but no network.

    gpu_bundle.py [--python 3.12] [--platform x86_64] [--nccl nvidia-nccl-cu13==VERSION] [--out gpu-bundle]

The folder contains ddp-launch of this checkout and what it needs, in pieces of at most 48 MiB; a larger file is split.
bundle_install.py, which goes with it, puts the pieces together and installs them there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PIECE_BYTES = 48 << 20
NEEDED = ("grpcio", "protobuf", "psutil", "pytest", "pytest-timeout", "hypothesis", "setuptools")
# pip takes only exactly these; wheels for an old glibc are preferred.
_GLIBCS = ("1", "2010", "2014", *(f"_2_{minor}" for minor in range(12, 36)))
_INSTALL = """Wheels for `make gpu` on a machine without a network.

Carry these pieces there, together or one by one, into one folder. Carry the checkout of ddp-launch too. Then run there:

    python3 {install} THAT-FOLDER --target /tmp/site       # beside the packages of python3; or --venv FOLDER

It prints the command with which to run `make gpu`.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default="3.12", help="the release of the interpreter there")
    parser.add_argument("--platform", default="x86_64", help="its machine: x86_64 or aarch64")
    parser.add_argument("--nccl", help="also another NCCL, for example nvidia-nccl-cu13==2.30.7")
    parser.add_argument("--out", type=Path, default=ROOT / "gpu-bundle")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wheels = Path(folder, "wheels")
        build(wheels)
        download(wheels, options.python, options.platform, pins(requirements()), *NEEDED)
        if options.nccl:
            download(wheels, options.python, options.platform, {}, "--no-deps", options.nccl)
        shutil.rmtree(options.out, ignore_errors=True)
        pieces = lay_out(wheels, options.out)
    shutil.copy(Path(__file__).with_name("bundle_install.py"), options.out)
    (options.out / "INSTALL.txt").write_text(_INSTALL.format(install="bundle_install.py"))
    sizes = ", ".join(f"{sum(f.stat().st_size for f in piece.iterdir()) >> 20} MiB" for piece in pieces)
    print(
        f"{options.out}: {len(pieces)} pieces ({sizes}). {options.out}/INSTALL.txt says how to install them"
    )


def build(wheels: Path) -> None:
    """Not in the build/ of the checkout, where modules of earlier builds may lie."""
    wheels.mkdir()
    config = wheels.with_name("build.cfg")
    config.write_text(f"[build]\nbuild_base = {wheels.with_name('build')}\n")
    words = ("wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(ROOT))
    env = os.environ | {"DIST_EXTRA_CONFIG": str(config)}
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, env=env)


def requirements() -> str:
    return "\n".join((ROOT / "requirements" / name).read_text() for name in ("install.txt", "test.txt"))


def pins(locked: str) -> dict[str, str]:
    """The versions with which this project is tested, of what is asked for; others come in the newest that fits."""
    found = dict(re.findall(r"^([\w.-]+)==([\w.+-]+)", locked, re.MULTILINE))
    return {name: version for name, version in found.items() if name in NEEDED}


def download(wheels: Path, python: str, machine: str, pinned: dict[str, str], *wanted: str) -> None:
    words = ["--only-binary", ":all:", "--implementation", "cp", "--python-version", python]
    for glibc in _GLIBCS:
        words += ["--platform", f"manylinux{glibc}_{machine}"]
    names = [f"{each}=={pinned[each]}" if each in pinned else each for each in wanted]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", *words]
    if subprocess.run([*command, "--dest", str(wheels), *names], check=False).returncode != 0:
        sys.exit(f"gpu-bundle: pip could not download {' '.join(names)} for Python {python} on {machine}")


def lay_out(wheels: Path, out: Path) -> list[Path]:
    """Into pieces, the smallest files first; with a list of all files in each piece."""
    files = sorted(wheels.iterdir(), key=lambda path: path.stat().st_size)
    manifest = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    pieces: list[Path] = []
    room = 0
    for path in files:
        whole = path.read_bytes()
        for at in range(0, len(whole), PIECE_BYTES):
            part = whole[at : at + PIECE_BYTES]
            if len(part) > room:
                pieces.append(out / f"piece-{len(pieces) + 1}")
                pieces[-1].mkdir(parents=True)
                (pieces[-1] / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
                room = PIECE_BYTES
            suffix = f".part-{at // PIECE_BYTES:03d}" if len(whole) > PIECE_BYTES else ""
            (pieces[-1] / f"{path.name}{suffix}").write_bytes(part)
            room -= len(part)
    return pieces


if __name__ == "__main__":
    main()
