"""Reads the versions of torch, NCCL, CUDA, Python and the driver from files, without an import of torch.

Works only for this interpreter. The versions of another interpreter (PYTHON_EXEC) are unknown.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

from launcher.machine.gpu_reading import text_of
from launcher.preflight.checkup import Versions
from launcher.settings.import_path import import_path
from launcher.template.import_variables import too_old
from rendezvous.values.contracts import PROTOCOL, VERSION

# --- packages --------------------------------------------------------------------------------------


def versions(python: str = "") -> Versions:
    """`python`: the ranks' interpreter, "" for this one."""
    driver = driver_version()
    if python and os.path.realpath(python) != os.path.realpath(sys.executable):
        return Versions(driver=driver)
    folder = _torch_folder()
    if not folder:
        return Versions(platform.python_version(), driver=driver)
    text = text_of(os.path.join(folder, "version.py"))
    return Versions(
        platform.python_version(),
        _version_in(text),
        _assigned("cuda", text) or _prefixed("rocm", _assigned("hip", text)),
        _nccl_beside(os.path.dirname(folder)),
        driver,
    )


def torch_version() -> str:
    """The version of this interpreter's torch; "" if it has none."""
    folder = _torch_folder()
    return _version_in(text_of(os.path.join(folder, "version.py"))) if folder else ""


def _torch_folder() -> str:
    found = PathFinder.find_spec("torch", import_path(os.environ))
    return os.path.dirname(found.origin) if found is not None and found.origin else ""


def _version_in(text: str) -> str:
    return _assigned("__version__", text) or _assigned("torch_version", text)


def _assigned(name: str, text: str) -> str:
    found = re.search(
        rf"^{name}(?:\s*:[^=\n]*)?\s*=\s*(?:TorchVersion\()?['\"]([^'\"\s]+)['\"]", text, re.MULTILINE
    )
    return found[1] if found else ""


def _prefixed(word: str, version: str) -> str:
    return f"{word}-{version}" if version else ""


def _nccl_beside(site: str) -> str:
    """The torch wheels install NCCL as a separate package; its name contains the CUDA version."""
    pattern = re.compile(r"nvidia_nccl_cu\d+-([^-]+)\.dist-info", re.IGNORECASE)
    try:
        names = sorted(os.listdir(site))
    except OSError:
        return ""
    return next((found[1] for name in names if (found := pattern.fullmatch(name))), "")


def driver_version() -> str:
    loaded = text_of("/sys/module/nvidia/version").strip()
    if loaded:
        return loaded
    # "... Module for x86_64  550.54.14  ..."
    words = text_of("/proc/driver/nvidia/version").split("\n")[0].split()
    return next((word for word in words if word[:1].isdigit() and "." in word), "")


# --- compiled core ----------------------------------------------------------------------------------
#
# Whether the compiled parts of `ddp` are installed and can be loaded. `ddp` itself is not imported.

_PARTS = ("ddp.groups._native", "ddp.telemetry._page")
NOT_COMPILED = "not compiled"


def state() -> str:
    """Return `compiled`, `NOT_COMPILED`, or why it cannot be loaded."""
    try:
        for name in _PARTS:
            _load(name)
    except FileNotFoundError:
        return NOT_COMPILED
    except ImportError as error:
        return f"cannot be loaded ({error})"
    return "compiled"


def kernels() -> str:
    """The instructions that the core computes with, for example avx512. Call it only if the core is compiled."""
    return str(_load(_PARTS[0]).kernels())


def _load(name: str) -> ModuleType:
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    base = os.path.join(root, *name.split("."))
    path = next((base + suffix for suffix in EXTENSION_SUFFIXES if os.path.exists(base + suffix)), "")
    if not path:
        raise FileNotFoundError(base)
    # Under its last name, without its package: `import ddp` later loads it as usual.
    loader = ExtensionFileLoader(name.rpartition(".")[2], path)
    spec = spec_from_file_location(loader.name, path, loader=loader)
    assert spec is not None
    return module_from_spec(spec)


# --- ddp-launch --version --------------------------------------------------------------------------
#
# The text of `ddp-launch --version`: our version, and the versions of what it works with. Imports nothing large.


def version_text() -> str:
    """Return the text of `ddp-launch --version`. Imports nothing large."""
    core = state()
    if core == "compiled":
        core += f", {kernels()} kernels"
    else:
        core += "; collectives of CPU tensors use Gloo"
    return "\n".join(
        (
            f"ddp-launch {VERSION}",
            _torch(torch_version()),
            f"core {core}",
            f"protocol {PROTOCOL}",
            f"python {platform.python_version()}",
        )
    )


def _torch(version: str) -> str:
    words = too_old(version)
    return f"torch {version or 'not installed'}" + (f": {words}" if words else "")
