"""Compiles the device once for each version of its sources, of torch and of Python; one process at a time.

The result lies in the environment that torch is in. `python tests/accelerator/emu_build.py` builds it beforehand.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

_SOURCES = Path(__file__).parent / "emu" / "csrc"
_NAME = "_emu"
_OLDEST = (2, 13)  # tried; with 2.8 it compiles, and the backward of a convolution ends the process


class CannotBuild(RuntimeError):
    """The device is not there, and why."""


def built() -> Path:
    """The library, compiled now if it is not there yet; or raises CannotBuild."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise CannotBuild(
            f"the emulated accelerator needs torch {oldest} or newer; here is {torch.__version__}"
        )
    target = _target()
    if target.exists():
        return target
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if sys.platform != "linux" or not compiler:
        raise CannotBuild(
            "the emulated accelerator needs Linux and a C++ compiler; install g++, or set CXX to a compiler"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(compiler, target)
    return target


def _target() -> Path:
    digest = hashlib.sha256(f"{torch.__version__} {sys.version} {' '.join(_flags())}".encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    return Path(sys.prefix, "emulated-accelerator", digest.hexdigest()[:16], f"{_NAME}.so")


def _flags() -> list[str]:
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)  # as torch.utils.cpp_extension does
    # Older releases say with what their bindings were compiled: classes are shared only by what is named alike.
    named = (
        (name, getattr(torch._C, f"_PYBIND11_{name}", None))
        for name in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI")
    )
    return [
        "-std=c++20",
        "-O1",
        "-fPIC",
        "-shared",
        "-fvisibility=hidden",
        "-w",
        f"-DTORCH_EXTENSION_NAME={_NAME}",
        f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        *(f'-DPYBIND11_{name}="{value}"' for name, value in named if value),
    ]


def _compile(compiler: str, target: Path) -> None:
    home = Path(torch.__file__).parent
    places = [home / "include", home / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    half_done = target.with_suffix(".partly")
    command = [
        compiler,
        *_flags(),
        *(f"-I{place}" for place in places),
        str(_SOURCES / "module.cpp"),
        "-o",
        str(half_done),
        f"-L{home / 'lib'}",
        f"-Wl,-rpath,{home / 'lib'}",
        *("-ltorch_cpu", "-ltorch_python", "-lc10", "-ldl"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line.lower()] or ["no message"]
        raise CannotBuild(
            f"torch {torch.__version__} and {compiler} do not build the emulated accelerator: {errors[0]}"
        )
    for old in target.parent.parent.iterdir():
        if old.is_dir() and old != target.parent:
            shutil.rmtree(old, ignore_errors=True)  # of other sources; a process that uses it keeps it open
    half_done.rename(target)


if __name__ == "__main__":
    try:
        built()
    except CannotBuild as problem:
        print(f"{problem}. Its tests will be skipped.")
