"""Installs the pieces of `make gpu-bundle` for this interpreter, without a network. Its own packages do not change.

    python3 bundle_install.py FOLDER (--target FOLDER | --venv FOLDER)

--target puts them into a folder for PYTHONPATH. --venv makes an environment that also sees the packages of python3.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


class Incomplete(Exception):
    """The text says which files are missing or broken."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="with all the pieces")
    into = parser.add_mutually_exclusive_group(required=True)
    into.add_argument("--target", type=Path)
    into.add_argument("--venv", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            wheels = joined(options.folder, Path(folder))
        except Incomplete as error:
            print(f"bundle_install: {error}", file=sys.stderr)
            return 1
        python = install(wheels, options.target, options.venv)
    begin = f"PYTHONPATH={options.target.absolute()} " if options.target else ""
    libraries = sorted((options.target or options.venv).absolute().rglob("libnccl.so.2"))
    nccl = f" LIBNCCL={libraries[0]}" if libraries else ""
    print(f"run, in the checkout: {begin}make gpu PYTHON={python}{nccl}")
    return 0


def joined(folder: Path, into: Path) -> list[Path]:
    """The wheels, with split ones put together, all of them checked."""
    manifests = sorted(folder.rglob("manifest.json"))
    if not manifests:
        raise Incomplete(f"there is no piece of a bundle in {folder}")
    wheels = []
    for name, digest in json.loads(manifests[0].read_text()).items():
        parts = sorted(folder.rglob(f"{name}.part-*")) or sorted(folder.rglob(name))[:1]
        wheel = into / name
        with wheel.open("wb") as file:
            for part in parts:
                file.write(part.read_bytes())
        if hashlib.sha256(wheel.read_bytes()).hexdigest() != digest:
            raise Incomplete(f"{name} is missing or incomplete in {folder}; copy all pieces there")
        wheels.append(wheel)
    return wheels


def install(wheels: list[Path], target: Path | None, venv: Path | None) -> str:
    """With what to run Python afterwards."""
    python = sys.executable
    if venv is not None:
        # Beside torch of an environment: the packages of the interpreter behind it would not be enough.
        subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", str(venv)], check=True)
        python = str(venv.absolute() / "bin" / "python")
        mine = [path for path in sys.path if path.endswith("site-packages")]
        (site,) = list((venv / "lib").glob("python*/site-packages"))
        (site / "beside.pth").write_text("\n".join(mine) + "\n")
    words = ["--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check", "-q", "--upgrade"]
    where = ["--target", str(target)] if target is not None else []
    if target is not None and not has_pip(python):
        for wheel in wheels:
            unpack(wheel, target)
        return python
    subprocess.run([python, "-m", "pip", "install", *words, *where, *map(str, wheels)], check=True)
    return python


def has_pip(python: str) -> bool:
    return (
        subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0
    )


def unpack(wheel: Path, target: Path) -> None:
    """A wheel is an archive of a folder for sys.path, but for what is in NAME.data/."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            top, _, rest = name.partition("/")
            if not top.endswith(".data"):
                archive.extract(name, target)
            elif rest.startswith(("purelib/", "platlib/")) and not name.endswith("/"):
                into = target / rest.partition("/")[2]
                into.parent.mkdir(parents=True, exist_ok=True)
                into.write_bytes(archive.read(name))


if __name__ == "__main__":
    sys.exit(main())
