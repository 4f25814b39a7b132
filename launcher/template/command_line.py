"""Sets the command line that `ps` shows for this process.

A template is started before the arguments of its ranks are known. The kernel lets a process say where its arguments are
(PR_SET_MM_MAP), without privileges.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import NamedTuple

_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_NO_FILE = 0xFFFFFFFF
# The numbers of the fields in /proc/PID/stat, in the order of the kernel's structure; 0: not in the file.
_ADDRESSES = {
    "start_code": 26,
    "end_code": 27,
    "start_data": 45,
    "end_data": 46,
    "start_brk": 47,
    "brk": 0,
    "start_stack": 28,
    "arg_start": 48,
    "arg_end": 49,
    "env_start": 50,
    "env_end": 51,
}


class _Map(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in _ADDRESSES),
        ("auxv", ctypes.c_uint64),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


class _Kept(NamedTuple):
    memory: mmap.mmap
    view: ctypes.Array[ctypes.c_char]


_kept: list[_Kept] = []  # the kernel reads them for as long as the process lives


def show(argv: list[str]) -> bool:
    """Return False if the kernel does not permit it. Nothing has changed then."""
    text = b"".join(word.encode(errors="surrogateescape") + b"\0" for word in argv)
    # Private memory: the kernel does not read arguments from shared pages.
    memory = mmap.mmap(-1, max(len(text), 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(text)
    view = (ctypes.c_char * max(len(text), 1)).from_buffer(memory)
    _kept.append(_Kept(memory, view))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(") ")[2].split()
    layout = _Map(auxv_size=0, exe_fd=_NO_FILE)
    for name, number in _ADDRESSES.items():
        setattr(layout, name, int(fields[number - 3]) if number else libc.sbrk(0))
    layout.arg_start = ctypes.addressof(view)
    layout.arg_end = layout.arg_start + len(text)
    return not libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(layout), ctypes.sizeof(layout), 0)
