"""Makes the root file system of one pod and becomes its command: `unshare --mount pod_root.py REQUEST`, as root.

The system's programs and what they need of this machine are mounted into an empty root, then the pod's own volumes at
the places that its manifest names. So commands and variables of the manifest hold as they stand. REQUEST is a file:

    root, read_only                an empty folder; whether what is not a volume can be written to
    shown                          folders to be seen at their own paths
    mounts                         [path, source or null, read_only]; null: a new folder in memory
    group                          whose its folders in memory are
    words, env, folder             what setpriv is told, above all the command
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import sys
from pathlib import Path
from typing import Any

_BIND, _REC, _NOSUID, _NODEV = 0x1000, 0x4000, 2, 4
_MOUNT_SETATTR, _PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}
_AT_FDCWD, _AT_RECURSIVE, _READ_ONLY, _DETACH = -100, 0x8000, 1, 2
_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "proc", "sys", "dev")
_OF_ETC = (
    "hosts",
    "host.conf",
    "nsswitch.conf",
    "ld.so.cache",
    "passwd",
    "group",
    "ssl",
    "alternatives",
    "localtime",
)
_C = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: object) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{os.strerror(ctypes.get_errno())}: {what}")


def _mount(source: str, target: Path, kind: str = "", flags: int = 0, data: str = "") -> None:
    words = (text.encode() for text in (source, str(target), kind))
    _checked(_C.mount(*words, ctypes.c_ulong(flags), data.encode()), f"{source} at {target}")


def _make_read_only(path: Path) -> None:
    attributes = struct.pack("QQQQ", _READ_ONLY, 0, 0, 0)
    words = (_AT_FDCWD, str(path).encode(), _AT_RECURSIVE, attributes, len(attributes))
    _checked(_C.syscall(_MOUNT_SETATTR, *words), path)


def _show(path: Path, root: Path) -> None:
    """At its own path. Folders above it that others cannot enter are not shown: an empty one stands in their place."""
    target = root / path.relative_to("/")
    if path.is_symlink():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(os.readlink(path))
    elif path.is_dir():
        target.mkdir(parents=True, exist_ok=True)
        _mount(str(path), target, flags=_BIND | _REC)
    elif path.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
        _mount(str(path), target, flags=_BIND)


def build(request: dict[str, Any]) -> Path:
    root = Path(request["root"])
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, "mode=755")
    for name in (*_SYSTEM, *(f"etc/{each}" for each in _OF_ETC)):
        _show(Path("/", name), root)
    places = [(root / path.lstrip("/"), source, read_only) for path, source, read_only in request["mounts"]]
    shown = [Path(path) for path in request["shown"]]
    beneath = [
        path for path in shown if any((root / path.relative_to("/")).is_relative_to(p) for p, _, _ in places)
    ]
    for path in shown:
        if path not in beneath and not (root / path.relative_to("/")).exists():
            _show(path, root)
    for target, _, _ in places:
        target.mkdir(parents=True, exist_ok=True)
    if request["read_only"]:
        _make_read_only(root)
    for target, source, _ in places:
        if source is None:
            _mount("tmpfs", target, "tmpfs", _NOSUID | _NODEV, f"mode=2777,gid={request['group']}")
        else:
            _mount(source, target, flags=_BIND)
    for path in beneath:  # a repository under /tmp, where the pod has a folder of its own
        _show(path, root)
        if request["read_only"]:
            _make_read_only(root / path.relative_to("/"))
    for target, _, read_only in places:
        if read_only:
            _make_read_only(target)
    return root


def enter(root: Path) -> None:
    """This machine's files are gone then; only what was mounted is there."""
    os.chdir(root)
    number = _PIVOT_ROOT[os.uname().machine]
    _checked(_C.syscall(number, b".", b"."), "pivot_root")
    _checked(_C.umount2(b".", _DETACH), "umount")
    os.chdir("/")


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    enter(build(request))
    os.chdir(request["folder"])
    os.execve(request["words"][0], request["words"], request["env"])


if __name__ == "__main__":
    main()
