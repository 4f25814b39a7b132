"""Runs the compiled core of x86-64 on an older glibc than this system's: `make dist`.

The storm of tests/ddp_backends, bound to old symbols as the wheel is, runs with the glibc of Debian 11. That is 2.31,
in which threads and dlopen are libraries of their own. Python has loaded these, so they are preloaded here. The same
program without the old symbols has to fail, else nothing is proved. What is missing is printed, and is not an error.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import debian

ROOT = Path(__file__).parents[2]
SYSTEM = ROOT / ".venv-old"  # kept from run to run
COMPILER = "x86_64-linux-gnu-gcc"
CORE = ROOT / "ddp/groups/_core"
_PARTS = ("collectives", "kernels", "queue", "ring", "segment")
_FLAGS = ("-std=gnu11", "-O3", "-fwrapv", "-ffp-contract=off", "-pthread", "-nostartfiles", f"-I{CORE}")
# In place of the start files of this system, which are for its glibc.
_START = """
#include <stdlib.h>
int main(void);
void *__dso_handle __attribute__((visibility("hidden"))) = 0;
__attribute__((force_align_arg_pointer, noreturn)) void _start(void) { exit(main()); }
"""
_WITHIN_S = 120


def main() -> None:
    missing = [each for each in (*debian.PROGRAMS, COMPILER) if not shutil.which(each)]
    if missing:
        print(f"the core was not run on an older glibc: {', '.join(missing)}: not here")
        return
    try:
        libraries = debian.unpack(SYSTEM, "amd64", ("libc6",), "bullseye") / "lib/x86_64-linux-gnu"
    except debian.Unavailable as error:
        print(f"the core was not run on an older glibc: {error}")
        return
    old = str(Path(__file__).parent / "old_glibc.h")
    with tempfile.TemporaryDirectory() as folder:
        if not ran(libraries, storm(Path(folder), "-include", old)):
            sys.exit("the core does not run on glibc 2.31")
        if ran(libraries, storm(Path(folder))):
            sys.exit("the core would run on glibc 2.31 without old_glibc.h: the trial proves nothing")
    print("x86-64: the collectives are right on glibc 2.31")


def storm(folder: Path, *more: str) -> Path:
    (folder / "start.c").write_text(_START)
    sources = [
        folder / "start.c",
        ROOT / "tests/ddp_backends/storm.c",
        *(CORE / f"{name}.c" for name in _PARTS),
    ]
    words = [COMPILER, *_FLAGS, *more, "-o", folder / "storm", *sources]
    subprocess.run([str(word) for word in words], check=True)
    return folder / "storm"


def ran(libraries: Path, program: Path) -> bool:
    loaded = " ".join(str(libraries / name) for name in ("libpthread.so.0", "libdl.so.2"))
    words = [libraries / "ld-linux-x86-64.so.2", "--library-path", libraries, "--preload", loaded, program]
    done = subprocess.run([str(word) for word in words], capture_output=True, timeout=_WITHIN_S, check=False)
    return done.returncode == 0


if __name__ == "__main__":
    main()
