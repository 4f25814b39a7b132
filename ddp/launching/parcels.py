"""The function, its arguments and its results as files of a private folder.

Files and not pipes: a result may have gigabytes, and a rank must be able to end before anybody reads it.
"""

from __future__ import annotations

import linecache
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp.launching.errors import CANNOT_PICKLE, PACKAGE_MISSING, RESULT_UNREADABLE, LaunchError

_CALL, _UNSENDABLE = "call", "unsendable"
_MOST_SOURCE = 1 << 20  # characters; the latest cells are sent


def write_call(
    folder: Path, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Raises `LaunchError` if the call cannot be pickled."""
    name = getattr(function, "__qualname__", repr(function))
    try:
        data = _pickled((function, tuple(args), dict(kwargs)))
    except LaunchError:
        raise
    except Exception as error:  # whatever the __reduce__ of an object raises
        raise LaunchError(
            f"cannot send {name} and its arguments to the ranks: {_first_line(error)}. Create locks, files, sockets "
            "and CUDA tensors inside the function",
            CANNOT_PICKLE,
        ) from error
    path = [os.path.abspath(entry) for entry in sys.path]  # "" is the current folder
    _write(folder / _CALL, pickle.dumps(path) + pickle.dumps(_sources()) + data)


def _sources() -> dict[str, str]:
    """The cells of a notebook and the like: code without a file, whose lines a traceback of a rank is to show."""
    found: dict[str, str] = {}
    room = _MOST_SOURCE
    for name, entry in reversed(list(linecache.cache.items())):
        if len(entry) == 4 and entry[1] is None and not os.path.exists(name):
            text = "".join(entry[2])
            room -= len(text)
            if room < 0:
                break
            found[name] = text
    return found


def call_in(folder: Path) -> Any:
    """What a rank calls. Modules of the caller's folders can be imported, as in the calling process."""
    with open(folder / _CALL, "rb") as file:
        known = {os.path.abspath(entry) for entry in sys.path}
        sys.path += [entry for entry in pickle.load(file) if entry not in known]
        for name, text in pickle.load(file).items():
            linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        return pickle.load(file)


def write_result(folder: Path, generation: int, rank: int, value: Any) -> None:
    try:
        data = _pickled(value)
    except Exception as error:
        text = (
            f"cannot return the result of rank {rank}: {_first_line(error)}. Return plain values or tensors"
        )
        _write(folder / _UNSENDABLE, text.encode())
        raise LaunchError(text, CANNOT_PICKLE) from error
    _write(folder / f"result-{generation}-{rank}", data)


def unsendable(folder: Path) -> str:
    """What a rank has said of a result that cannot be pickled; "" if there was none."""
    try:
        return (folder / _UNSENDABLE).read_text()
    except FileNotFoundError:
        return ""


def results_in(folder: Path) -> list[Any]:
    """What the ranks of the last generation have returned, in the order of ranks."""
    found: dict[int, dict[int, Path]] = {}
    for path in folder.glob("result-*"):
        _, generation, rank = path.name.split("-")
        found.setdefault(int(generation), {})[int(rank)] = path
    last = found[max(found)] if found else {}
    numbers = sorted(last)
    if not numbers or numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        raise LaunchError(
            "the job has ended well, but a rank has left no result. The function must return, and not call os._exit",
            RESULT_UNREADABLE,
            0,
        )
    return [_loaded(rank, last[rank]) for rank in numbers]


def _loaded(rank: int, path: Path) -> Any:
    try:
        with open(path, "rb") as file:
            return pickle.load(file)
    except Exception as error:  # whatever the result needs here: a package, a device
        raise LaunchError(
            f"cannot read the result of rank {rank}: {type(error).__name__}: {_first_line(error)}",
            RESULT_UNREADABLE,
            0,
        ) from error


def _pickled(value: Any) -> bytes:
    try:
        import cloudpickle
    except ImportError:
        function = value[0] if isinstance(value, tuple) and value else None
        if getattr(function, "__module__", "") == "__main__":
            raise LaunchError(
                "a function of a script or a notebook needs the package cloudpickle. "
                f"Run: {sys.executable} -m pip install cloudpickle",
                PACKAGE_MISSING,
            ) from None
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    data: bytes = cloudpickle.dumps(value)
    return data


def _write(path: Path, data: bytes) -> None:
    """Whole, or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(data)
    partial.replace(path)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
