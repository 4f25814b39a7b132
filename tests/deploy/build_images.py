"""Builds the images of deploy/docker on a base made here from Debian's packages: no registry is asked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from containers import BASE, ETCD, ROOT, SERVICE, TRAINING, TRAINING_BASE, image_exists, podman

_BUILD_S = 600.0
_PATH = "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_OF_TORCH = ("torch", "torchgen", "functorch", "numpy", "numpy.libs", "sympy", "mpmath", "networkx", "jinja2")
_OF_TORCH_TOO = ("markupsafe", "filelock", "fsspec", "typing_extensions.py", "isympy.py")


def build_all() -> None:
    _base()
    _etcd()
    _build("service.Dockerfile", SERVICE, f"BASE={BASE}")
    _torch()
    _build("training.Dockerfile", TRAINING, f"TRAINING_BASE={TRAINING_BASE}")


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
        podman("build", "--quiet", "--isolation=chroot", "-t", ETCD, folder, timeout_s=_BUILD_S)


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
        podman("build", "--quiet", "--isolation=chroot", "-t", TRAINING_BASE, folder, timeout_s=_BUILD_S)


def _build(dockerfile: str, tag: str, *arguments: str) -> None:
    words = ["build", "--quiet", "--format=docker", "--isolation=chroot", "--network=host", *_pip_as_here()]
    for each in arguments:
        words += ["--build-arg", each]
    podman(*words, "-f", f"deploy/docker/{dockerfile}", "-t", tag, str(ROOT), timeout_s=_BUILD_S)


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
