"""Forks of a large process: which files they keep open, what makes them cheap, and how they end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys

# --- open files ------------------------------------------------------------------------------------
#
# Limits the open files of a new rank to standard input, output and error.


def close_inherited(*spared: int) -> None:
    """Close what the parent shell left open across its exec, except `spared`. What Python opened itself stays open."""
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd > 2 and fd not in spared and _crosses_exec(fd):
            os.close(fd)


def _crosses_exec(fd: int) -> bool:
    try:
        return os.get_inheritable(fd)
    except OSError:  # the descriptor that listed the folder
        return False


# --- forks -----------------------------------------------------------------------------------------
#
# Forks, and what makes forks of a large process cheap.


def fork() -> tuple[int, str]:
    """Return the child's pid, or -1 and the reason."""
    import warnings

    with warnings.catch_warnings():
        # Idle worker threads of a library do not survive into the child, and need not. Python warns nevertheless.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return os.fork(), ""
        except OSError as error:
            return -1, str(error.strerror)


def freeze_garbage() -> None:
    """Move the objects of torch's import to the permanent generation, so GC in the ranks does not copy their memory.

    `__main__` is excluded: the script fills it, and a collection frees it at exit.
    """
    import ctypes
    import gc

    main = sys.modules["__main__"]
    gc.freeze()
    for script_owned in (main, main.__dict__):
        ctypes.pythonapi.PyObject_GC_UnTrack(ctypes.py_object(script_owned))
        ctypes.pythonapi.PyObject_GC_Track(ctypes.py_object(script_owned))


# --- the exit --------------------------------------------------------------------------------------
#
# Shortens the exit of a warm rank: the C library's exit, without the destructors that torch registered.
#
# Destroying libtorch's static objects takes a large part of the exit time and has no benefit: the kernel frees the
# memory. Exit functions run in reverse order of registration. The launcher registers its own after torch is loaded
# and before the script starts. So the exit functions of libraries that the script loads still run. Then the C and
# C++ streams are flushed. Then `_exit` keeps the status and skips what was registered earlier.
#
# Tools that write their results from a destructor need it to run, so their variables switch this off.
# If the C library lacks `on_exit` (musl), the exit is the usual one.

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
    # Flush std::cout and std::clog too: they have their own buffer after a library calls sync_with_stdio(false).
    with contextlib.suppress(OSError, AttributeError, ValueError):
        cpp = ctypes.CDLL(
            "libstdc++.so.6", os.RTLD_NOLOAD | os.RTLD_NOW
        )  # loaded later, it flushes by itself
        for stream in ("_ZSt4cout", "_ZSt4clog"):
            at_exit(cpp._ZNSo5flushEv, ctypes.byref(ctypes.c_char.in_dll(cpp, stream)), None)
