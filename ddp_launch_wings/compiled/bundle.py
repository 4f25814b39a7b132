"""What torch.compile has made in this process, as bytes: collected, checked, and given to torch again.

A bundle has a line of JSON, and behind it a zip file. The line names the key, the length and the SHA-256 of the zip.
In it are the artifacts of `torch.compiler.save_cache_artifacts`, which do not contain the libraries of C++ kernels. So
those libraries in torch's cache folder that this process has mapped are added, and the small ones by which torch finds
out what the CPU can do. A torch without artifacts gives the files that were written to its folder since it started.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import sys
import zipfile
from collections.abc import Iterable
from typing import Any

import torch

from ddp.telemetry import torch_api, torch_names

MOST_BYTES = 256 << 20
_ARTIFACTS, _FILES = "artifacts", "files/"
_MOST_LOOKED_AT, _SMALL, _CPU_CHECK = 4096, 64 << 10, b"_chk_kernel"


class BundleRefused(ValueError):
    """A bundle that this process does not use, and why."""


def key() -> str:
    """Equal in two processes that may use the same code: versions, CPU, device, script."""
    parts = [
        torch.__version__,
        str(torch.version.git_version),
        sys.version,
        platform.machine(),
        *platform.libc_ver(),
    ]
    parts += [str(getattr(sys.modules.get("triton"), "__version__", "")), device(), _cpu(), _script()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def device() -> str:
    """The accelerator of this process, with its index: torch's own keys contain it. "" without one."""
    accelerator: Any = getattr(torch, "accelerator", None)
    if accelerator is None or not accelerator.is_available():
        return ""
    module: Any = getattr(torch, accelerator.current_accelerator().type, None)
    if module is None or not getattr(module, "is_initialized", lambda: False)():
        return ""
    index = accelerator.current_device_index()
    capability = getattr(module, "get_device_capability", lambda _index: "")(index)
    return f"{index} {module.get_device_name(index)} {capability}"


def _cpu() -> str:
    found = {torch.backends.cpu.get_cpu_capability()}
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith(("flags", "Features", "model name")):
                found.add(line)
    return "".join(sorted(found))


def _script() -> str:
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if not file or not os.path.isfile(file):
        return ""
    with open(file, "rb") as opened:
        return hashlib.sha256(opened.read()).hexdigest()


# --- collecting ------------------------------------------------------------------------------------


def cache_folder() -> str:
    return str(torch_api.get(torch_names.COMPILER_CACHE_FOLDER)())


def amount() -> int:
    """Grows when torch compiles, and takes nothing: a save is worth while after it."""
    return len(torch_api.get(torch_names.COMPILED_ARTIFACTS))


def collect(started: float) -> bytes | None:
    """What this process has compiled or loaded; None if it is nothing. BundleRefused if it is too large."""
    save = getattr(torch.compiler, "save_cache_artifacts", None)
    saved = save() if save is not None else None
    artifacts = b"" if saved is None else saved[0]
    folder = cache_folder()
    files = _written(folder, started) if save is None else _libraries(folder)
    if not artifacts and not files:
        return None
    total = len(artifacts) + sum(os.path.getsize(os.path.join(folder, file)) for file in files)
    if total > MOST_BYTES:
        raise BundleRefused(f"it has {total >> 20} MiB, and the limit is {MOST_BYTES >> 20}")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(_ARTIFACTS, artifacts)
        for file in files:
            with open(os.path.join(folder, file), "rb") as opened:
                archive.writestr(_FILES + file, opened.read())
    return packed.getvalue()


def _libraries(folder: str) -> list[str]:
    found = set()
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")[2]
            if f"/{path}".startswith(f"{folder}/") and path.endswith(".so"):
                found.add(os.path.relpath(f"/{path}", folder))
    for file in _all(folder):
        path = os.path.join(folder, file)
        if file.endswith(".so") and file not in found and os.path.getsize(path) <= _SMALL:
            with open(path, "rb") as opened:
                if _CPU_CHECK in opened.read():
                    found.add(file)
    return sorted(found)


def _written(folder: str, started: float) -> list[str]:
    return [
        file
        for file in _all(folder)
        if not file.endswith(".lock") and os.path.getmtime(os.path.join(folder, file)) >= started
    ]


def _all(folder: str) -> Iterable[str]:
    """The first few thousand files: the folder may be that of all jobs of the user."""
    left = _MOST_LOOKED_AT
    for inner, _, names in os.walk(folder):
        for name in sorted(names)[:left]:
            yield os.path.relpath(os.path.join(inner, name), folder)
        left -= len(names)
        if left <= 0:
            return


# --- the form --------------------------------------------------------------------------------------


def sealed(name: str, packed: bytes) -> bytes:
    head = {"key": name, "bytes": len(packed), "sha256": hashlib.sha256(packed).hexdigest()}
    return json.dumps(head).encode() + b"\n" + packed


def opened(name: str, data: bytes) -> bytes:
    line, _, packed = data.partition(b"\n")
    try:
        head = json.loads(line)
        expected = head["key"], head["bytes"], head["sha256"]
    except (ValueError, TypeError, KeyError):
        raise BundleRefused("it does not begin as it should") from None
    if expected != (name, len(packed), hashlib.sha256(packed).hexdigest()):
        raise BundleRefused("its contents do not match its digest")
    return packed


def give_to_torch(packed: bytes) -> int:
    """Return how many parts torch got. A file that is there already stays."""
    folder, count = cache_folder(), 0
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        names = archive.namelist()
        for name in names:
            path = os.path.normpath(os.path.join(folder, name.removeprefix(_FILES)))
            if name == _ARTIFACTS:
                continue
            if not path.startswith(f"{folder}/"):
                raise BundleRefused(f"it names {name}")
            count += 1
            if not os.path.exists(path):
                os.makedirs(os.path.dirname(path), exist_ok=True)
                write_once(path, archive.read(name), 0o700)
        artifacts = archive.read(_ARTIFACTS)
    if artifacts:
        info = torch.compiler.load_cache_artifacts(artifacts)
        if info is None:
            raise BundleRefused("torch does not read it")
        count += sum(len(keys) for keys in info.artifacts.values())
    return count


def write_once(path: str, data: bytes, mode: int = 0o600) -> None:
    """Others see the whole file or none."""
    partial = f"{path}.{os.getpid()}.tmp"
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(partial, path)
    except OSError:
        if os.path.exists(partial):
            os.unlink(partial)
        raise
