"""Shortens the exit of a warm rank: the C library's exit, without the destructors that torch registered.

Destroying libtorch's static objects takes a large part of the exit time and has no benefit: the kernel frees the
memory. Exit functions run in reverse order of registration. The launcher registers its own after torch is loaded and
before the script starts. So the exit functions of libraries that the script loads still run. Then the C and C++ streams
are flushed. Then `_exit` keeps the status and skips what was registered earlier.

Tools that write their results from a destructor need it to run, so their variables switch this off.
If the C library lacks `on_exit` (musl), the exit is the usual one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

_WRITING_AT_EXIT = (
    "LD_PRELOAD",
    "CUDA_INJECTION64_PATH",
    "NVTX_INJECTION64_PATH",
    "ASAN_OPTIONS",
    "LSAN_OPTIONS",
    "GCOV_PREFIX",
    "LLVM_PROFILE_FILE",
)


_arranged = False


def arrange() -> None:
    """Do it once: in the zygote before it learns, for the libraries that are loaded then belong to the script."""
    global _arranged
    if _arranged:
        return
    _arranged = True
    if any(os.environ.get(name) for name in _WRITING_AT_EXIT):
        return
    libc = ctypes.CDLL(None)
    try:
        on_exit, at_exit = libc.on_exit, libc.__cxa_atexit
        leave, close_streams = libc._exit, libc.fcloseall
    except AttributeError:
        return
    on_exit(leave, None)
    at_exit(close_streams, None, None)
    _flush_cpp_streams_before(at_exit)


def _flush_cpp_streams_before(at_exit: ctypes._NamedFuncPointer) -> None:
    """Flush std::cout and std::clog too: they have their own buffer after a library calls sync_with_stdio(false)."""
    with contextlib.suppress(OSError, AttributeError, ValueError):
        cpp = ctypes.CDLL(
            "libstdc++.so.6", os.RTLD_NOLOAD | os.RTLD_NOW
        )  # loaded later, it flushes by itself
        for stream in ("_ZSt4cout", "_ZSt4clog"):
            at_exit(cpp._ZNSo5flushEv, ctypes.byref(ctypes.c_char.in_dll(cpp, stream)), None)
