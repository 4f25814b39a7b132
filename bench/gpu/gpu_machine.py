"""What this machine has, asked in processes of their own: torch, GPUs, NCCL, and the packages that are needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_PATIENCE_S = 120.0
# What is imported, and the package that has it.
NEEDED = {"torch": "torch", "grpc": "grpcio", "google.protobuf": "protobuf", "psutil": "psutil"}
NEEDED_FOR_TESTS = {"pytest": "pytest", "pytest_timeout": "pytest-timeout", "hypothesis": "hypothesis"}

_ASK = """
import ctypes, importlib.util, json, os, platform, sys
def there(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False
def nccl_of(torch):
    # torch.cuda.nccl.version() is that of the headers; this asks the library to which torch is bound.
    number = ctypes.c_int()
    try:
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cuda.so"))
        library.ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return ""
    return f"{number.value // 10_000}.{number.value // 100 % 100}.{number.value % 100}"
facts = {"python": platform.python_version(), "missing": [n for n in sys.argv[1:] if not there(n)]}
if there("torch"):
    import torch
    facts["torch"] = torch.__version__
    facts["devices"] = []
    if torch.cuda.is_available():
        for at in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(at)
            facts["devices"].append(f"{p.name}, {p.total_memory >> 30} GiB, compute capability {p.major}.{p.minor}")
        facts["cuda"] = torch.version.cuda
    facts["nccl"] = nccl_of(torch)
    try:
        import ddp.groups._native
        facts["native"] = True
    except ImportError:
        facts["native"] = False
print("FACTS " + json.dumps(facts))
"""


class CannotAsk(Exception):
    pass


def facts(env: dict[str, str]) -> dict[str, Any]:
    """What the interpreter of this command finds in that environment."""
    command = [sys.executable, "-c", _ASK, *NEEDED, *NEEDED_FOR_TESTS]
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=_PATIENCE_S, cwd="/", check=False
        )
    except subprocess.TimeoutExpired:
        raise CannotAsk(f"an import of torch did not end within {_PATIENCE_S:g} s") from None
    lines = [line for line in done.stdout.splitlines() if line.startswith("FACTS ")]
    if not lines:
        raise CannotAsk(f"torch cannot be imported by {sys.executable}:\n{done.stderr.strip()[-1500:]}")
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("FACTS "))
    return found | {"processor": _processor(), "cpus": len(os.sched_getaffinity(0)), "driver": _driver()}


def _processor() -> str:
    names = (
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    return next(names, os.uname().machine)


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else ""


def missing_in_words(found: dict[str, Any]) -> str:
    """What is missing for any part, and how to get it; "" if nothing is."""
    missing = [NEEDED[name] for name in found["missing"] if name in NEEDED]
    if not missing:
        return ""
    names = " ".join(missing)
    return (
        f"{sys.executable} does not have {', '.join(missing)}. "
        f"With a network: {sys.executable} -m pip install {names}. "
        "Without one: run `make gpu-bundle` on a machine that has a network, carry the folder gpu-bundle/ to this "
        "machine, and follow gpu-bundle/INSTALL.txt"
    )


# --- another NCCL ------------------------------------------------------------------------------------

_LOAD = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
number = ctypes.c_int()
assert library.ncclGetVersion(ctypes.byref(number)) == 0
print(number.value)
"""


def library_of(path: str) -> tuple[Path, str]:
    """The file, and the version of NCCL in it. `path` is the file, or a folder that contains it."""
    given = Path(path).absolute()
    candidates = sorted(given.rglob("libnccl.so.2")) if given.is_dir() else [given]
    if not candidates or not candidates[0].is_file():
        raise CannotAsk(f"there is no libnccl.so.2 at {given}")
    file = candidates[0]
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["it has no ncclGetVersion"])[-1]
        raise CannotAsk(f"{file} is not an NCCL library for this machine: {reason}")
    number = int(done.stdout)
    return file, f"{number // 10_000}.{number // 100 % 100}.{number % 100}"


def preloaded(env: dict[str, str], library: Path) -> dict[str, str]:
    """LD_PRELOAD, because torch finds its own NCCL by a path in its libraries, which comes before LD_LIBRARY_PATH."""
    others = env.get("LD_PRELOAD", "")
    return env | {"LD_PRELOAD": f"{library}:{others}" if others else str(library)}


def check_preloaded(found: dict[str, Any], library: Path, version: str) -> None:
    if found.get("nccl") != version:
        raise CannotAsk(
            f"torch uses {found.get('nccl') or 'no'} NCCL, although {library} ({version}) is preloaded. "
            "This build of torch cannot use another NCCL; run without --libnccl (LIBNCCL=)"
        )
