"""Builds the images of deploy/docker on a base made here from Debian's packages: no registry is asked.

An image is built again when anything has changed that its Dockerfile copies; the one before is removed then, and no
layers in between are kept: nothing piles up.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from containers import BASE, ETCD, SERVICE, TRAINING, TRAINING_BASE, image_exists, podman
from images import ROOT

_BUILD_S = 900.0
_MADE_OF = "ddp-launch-test.made-of"  # a label
_WITHOUT_REST = ("--quiet", "--isolation=chroot", "--layers=false", "--force-rm")
_PATH = "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_OF_TORCH = ("torch", "torchgen", "functorch", "numpy", "numpy.libs", "sympy", "mpmath", "networkx", "jinja2")
_OF_TORCH_TOO = ("markupsafe", "filelock", "fsspec", "typing_extensions.py", "isympy.py")


def build_all() -> None:
    _base()
    _etcd()
    _build("service.Dockerfile", SERVICE, "BASE", BASE)
    _torch()
    _build("training.Dockerfile", TRAINING, "TRAINING_BASE", TRAINING_BASE)


def _base() -> None:
    if image_exists(BASE):
        return
    with tempfile.TemporaryDirectory() as folder:
        tar = f"{folder}/base.tar"
        packages = "--include=python3,python3-venv,python3-pip,ca-certificates"
        command = ["mmdebstrap", "--quiet", "--variant=minbase", packages, "bookworm", tar]
        subprocess.run(command, check=True, timeout=_BUILD_S)
        podman("import", "--quiet", "-c", _PATH, tar, BASE, timeout_s=_BUILD_S)


def _etcd() -> None:
    if image_exists(ETCD):
        return
    with tempfile.TemporaryDirectory() as folder:
        for name in ("etcd", "etcdctl"):
            if found := shutil.which(name):
                shutil.copy(found, folder)
        Path(folder, "Dockerfile").write_text(f"FROM {BASE}\nCOPY etcd* /usr/local/bin/\n")
        podman("build", *_WITHOUT_REST, "-t", ETCD, folder, timeout_s=_BUILD_S)


def _torch() -> None:
    """The torch of this environment, under the Python of the base: of the same minor version, or it would not load."""
    if image_exists(TRAINING_BASE):
        return
    here = Path(sysconfig.get_path("purelib"))
    with tempfile.TemporaryDirectory(dir=here.parent) as folder:
        for name in (*_OF_TORCH, *_OF_TORCH_TOO):
            if (here / name).exists():
                subprocess.run(["cp", "-al", str(here / name), folder], check=True)
        for found in here.glob("*.dist-info"):
            if found.name.partition("-")[0].lower() in (*_OF_TORCH, "typing_extensions", *_OF_TORCH_TOO):
                subprocess.run(["cp", "-al", str(found), folder], check=True)
        to = f"/usr/lib/python{sys.version_info.major}/dist-packages/"
        Path(folder, "Dockerfile").write_text(f"FROM {BASE}\nCOPY . {to}\n")
        podman("build", *_WITHOUT_REST, "-t", TRAINING_BASE, folder, timeout_s=_BUILD_S)


def _build(dockerfile: str, tag: str, argument: str, base: str) -> None:
    path = ROOT / "deploy" / "docker" / dockerfile
    made_of = _digest(path, podman("image", "inspect", "--format", "{{.Id}}", base))
    before = ""
    if image_exists(tag):
        label = f'{{{{index .Labels "{_MADE_OF}"}}}}'
        before, of = podman("image", "inspect", "--format", f"{{{{.Id}}}} {label}", tag).split(maxsplit=1)
        if of == made_of:
            return
    words = ["build", *_WITHOUT_REST, "--format=docker", "--network=host", *_pip_as_here()]
    words += ["--build-arg", f"{argument}={base}", "--label", f"{_MADE_OF}={made_of}"]
    podman(*words, "-f", str(path), "-t", tag, str(ROOT), timeout_s=_BUILD_S)
    if before:
        podman("image", "rm", before)


def _digest(dockerfile: Path, base: str) -> str:
    """Of all that goes into the image."""
    text = dockerfile.read_text()
    digest = hashlib.sha256(f"{base}\n{text}".encode())
    for copied in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
        for source in copied.split():
            root = ROOT / source
            files = sorted(root.rglob("*")) if root.is_dir() else [root]
            for path in (each for each in files if each.is_file() and "__pycache__" not in each.parts):
                digest.update(f"\n{path.relative_to(ROOT)}\n".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _pip_as_here() -> list[str]:
    """Where this machine takes packages from, the build takes them from, too."""
    words = [word for name in os.environ if name.startswith("PIP_") for word in ("--env", name)]
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "debug"], capture_output=True, text=True)
    for line in listed.stdout.splitlines():
        path, _, exists = line.strip().partition(", exists: ")
        if exists == "True" and path.endswith("pip.conf"):
            words += ["-v", f"{path}:/etc/pip.conf:ro"]
    places = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True)
    for word in places.stdout.replace("'", " ").replace("=", " ").split():
        folder = word.removeprefix("file://")
        if folder.startswith("/") and os.path.exists(folder):
            words += ["-v", f"{folder}:{folder}:ro"]
    pairs = list(dict.fromkeys(zip(words[::2], words[1::2], strict=True)))
    return [word for pair in pairs for word in pair]


if __name__ == "__main__":
    build_all()
