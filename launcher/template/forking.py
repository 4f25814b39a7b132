"""Forks, and what makes forks of a large process cheap."""

from __future__ import annotations

import os
import sys


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
