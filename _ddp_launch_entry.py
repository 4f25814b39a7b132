"""The entry points of our commands. They import our packages whatever the user's folders contain.

Python searches the folders of PYTHONPATH before its own library. A project with a `launcher.py`, a `rendezvous/` or a
`grpc.py` on PYTHONPATH would take the place of ours in the agent. So this module has a private name, and before it
imports anything else it moves those folders to the end of `sys.path`. They stay there, because our dependencies may be
installed in one of them. Ranks start with the unchanged PYTHONPATH.

That order does not help protobuf. Its package `google` is a namespace, without a file of its own, and a `google.py`
in any folder takes its place. So `google` is imported before those folders are in `sys.path` again.
"""

import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_PACKAGES = {"grpc": "grpcio", "google": "protobuf"}  # that provide these modules


def ddp_launch() -> int:
    _end_quietly_on_signals()
    _put_users_folders_last()
    if sys.argv[1:] == ["--version"] and _version_was_shown():
        return 0
    from launcher.cli import main

    if sys.argv[1:2] in (["doctor"], ["plan"], ["warm"]):  # the agent has handlers of its own
        _raise_on_interrupt()
    return _with_dependencies("ddp-launch", main)


def _end_quietly_on_signals() -> None:
    """Until a command handles signals itself, Ctrl-C ends it with its exit code, and not with a traceback."""
    for signum, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        if signal.getsignal(signum) == usual:
            signal.signal(signum, _end)


def _raise_on_interrupt() -> None:
    """Let the rest of a command clean up after Ctrl-C, by KeyboardInterrupt."""
    for signum, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        if signal.getsignal(signum) is _end:
            signal.signal(signum, usual)


def _end(signum: int, _frame: object) -> None:
    os._exit(128 + signum)


def _version_was_shown() -> bool:
    """Without the table of options, whose import takes half of the time. If it fails, the command itself says why."""
    from launcher import about

    try:
        sys.stdout.write(f"{about.text()}\n")
        sys.stdout.flush()
    except (OSError, AttributeError):
        return False
    return True


def ddp_rendezvous() -> int:
    _end_quietly_on_signals()
    _put_users_folders_last()
    from rendezvous.main import main

    _raise_on_interrupt()
    return _with_dependencies("ddp-rendezvous", main)


def ddpctl() -> int:
    _end_quietly_on_signals()
    _put_users_folders_last()
    from rendezvous.control.ctl import main

    _raise_on_interrupt()
    return _with_dependencies("ddpctl", main)


def _with_dependencies(command: str, main: "Callable[[], int]") -> int:
    """A job of one node needs none of them, so they are imported late."""
    try:
        return main()
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in _PACKAGES:
            raise
        sys.stderr.write(f"{command}: error: {_missing(module, error)} [DDP-1019]\n")
        return 2


def _missing(module: str, error: ModuleNotFoundError) -> str:
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is not None:
        return f"{file} hides the package {module} of {_PACKAGES[module]} ({error}): rename it"
    package = _PACKAGES[module]
    return f"{package} is not installed ({error}). Run: {sys.executable} -m pip install {package}"


def torchrun_backend() -> "Any":
    """torchrun's entry point: in its process the order of `sys.path` changes only for this import."""
    before = list(sys.path)
    _put_users_folders_last()
    try:
        from rendezvous.torchrun import backend

        return backend()
    finally:
        sys.path[:] = before


def _put_users_folders_last() -> None:
    library, ours = os.path.dirname(os.__file__), os.path.dirname(os.path.abspath(__file__))
    before = list(sys.path)
    after = reordered(before, library, ours)
    users = before[: _first_of_library(before, library)]
    sys.path[:] = [entry for entry in after if entry == ours or entry not in users]
    try:
        __import__("google")
    except Exception:  # protobuf is in a folder of the user, or nowhere, or broken: its own import will tell
        pass
    sys.path[:] = after


def _first_of_library(path: list[str], library: str) -> int:
    return min((place for place, entry in enumerate(path) if _is_library(entry, library)), default=0)


def reordered(path: list[str], library: str, ours: str) -> list[str]:
    """`path` with the standard library first, then `ours`, then the rest; entries in front of the library go last."""
    first = _first_of_library(path, library)
    users, rest = path[:first], path[first:]
    standard = [entry for entry in rest if _is_library(entry, library)]
    packages = [entry for entry in rest if entry not in standard and entry != ours]
    return [*standard, ours, *packages, *(entry for entry in users if entry != ours)]


def _is_library(entry: str, library: str) -> bool:
    """Whether `entry` is python3x.zip, the library's folder, or its lib-dynload."""
    beside = os.path.dirname(library)
    return entry in (library, os.path.join(library, "lib-dynload")) or (
        entry.endswith(".zip") and os.path.dirname(entry) in (beside, os.path.dirname(beside))
    )
