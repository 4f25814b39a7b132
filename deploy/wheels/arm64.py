"""Runs the arm64 wheel on this machine, under qemu: `make dist`.

    the interpreter of Debian for arm64 loads the compiled modules and runs `ddp-launch --version`
    the storm of tests/ddp_backends: three processes, random collectives, every sum compared

Jobs are not run: a rank is a program that is started by another, which needs the kernel's help under qemu. What is
missing here is printed, and is not an error: apt-get (Debian), qemu-aarch64 and the cross compiler.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import debian

ROOT = Path(__file__).parents[2]
SYSTEM = ROOT / ".venv-arm64"  # kept from run to run
PYTHON = "python3.11"
COMPILER = "aarch64-linux-gnu-gcc"
CORE = ROOT / "ddp/groups/_core"
_PARTS = ("collectives", "kernels", "queue", "ring", "segment")
_FLAGS = ("-std=gnu11", "-O3", "-fwrapv", "-ffp-contract=off", "-pthread")
_LOADS = "from ddp.elastic import _bulk_copy, _checksum; from ddp_launch_wings.redundancy import _erasure; "
_LOADS += "from ddp.groups import _native; "
_LOADS += "from ddp.reducer import _arrivals; "
_LOADS += "from ddp.telemetry import _ending, _page; import platform; "
_LOADS += "assert platform.machine() == 'aarch64'; print('loaded')"
_WITHIN_S = 300


def main() -> None:
    missing = [each for each in (*debian.PROGRAMS, "qemu-aarch64", COMPILER) if not shutil.which(each)]
    wheels = sorted((ROOT / "dist").glob("*aarch64.whl"))
    if missing or not wheels:
        print(f"the arm64 wheel was not run: {', '.join(missing) or 'dist/ has none'}: not here")
        return
    try:
        root = debian.unpack(SYSTEM, "arm64", (f"{PYTHON}-minimal", f"lib{PYTHON}-stdlib"))
    except debian.Unavailable as error:
        print(f"the arm64 wheel was not run: {error}")
        return
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheels[-1]) as archive:
            archive.extractall(folder)
        program = root / "usr/bin" / PYTHON
        for words in (("-c", _LOADS), ("-m", "launcher", "--version")):
            emulated(program, *words, cwd=folder)
        storm = Path(folder, "storm")
        sources = [str(CORE / f"{name}.c") for name in _PARTS]
        source = str(ROOT / "tests/ddp_backends/storm.c")
        subprocess.run([COMPILER, *_FLAGS, f"-I{CORE}", "-o", str(storm), source, *sources], check=True)
        emulated(storm, cwd=folder)
    print(f"{wheels[-1].name}: loaded, and its collectives are right, under qemu")


def emulated(program: Path, *words: str, cwd: str) -> None:
    command = ["qemu-aarch64", "-L", str(SYSTEM / "root"), str(program), *words]
    environ = {"PYTHONPATH": cwd, "PATH": os.defpath}
    done = subprocess.run(
        command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=_WITHIN_S, check=False
    )
    if done.returncode:
        sys.exit(f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()
