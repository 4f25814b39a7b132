"""The ways into the house: our commands start here, and find here the doors of wings.

The commands import our packages whatever the user's folders contain.

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

    if sys.argv[1:2] and sys.argv[1] in {
        "doctor",
        "warm",
        *names(COMMAND),
    }:  # the agent has handlers of its own
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
    from launcher.preflight import installed

    try:
        sys.stdout.write(f"{installed.version_text()}\n")
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
        return find(TORCHRUN, "ddp")()
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


# --- doors ------------------------------------------------------------------------------------------
#
# The house is the packages launcher, rendezvous and ddp. A wing is what they never import (docs/wings.md). It is found
# by a door and a name, which are a group and a name of entry points. The table of the wings that are installed with the
# house is `entry_points.txt` in the package of the wings; the metadata of ddp-launch is made of the same file. To read
# it takes a tenth of a millisecond, and `importlib.metadata` takes fifty. So the entry points of other packages are
# looked up only for a name that the table lacks.

COMMAND = "ddp_launch.command"  # `ddp-launch NAME ...`
STORE = "ddp_launch.store"  # of the service: `--store NAME://...`
PAGE = "ddp_launch.page"  # `--web`: the page of a service or of a job
COMMIT_SHIELD = "ddp_launch.commit_shield"  # of `ddp.elastic.State`, in ranks
HEALTH_SOURCE = "ddp_launch.health_source"  # `--health-source`
NODE_COMPARISON = "ddp_launch.node_comparison"  # `--preflight full` of several nodes, and doctor
FLEET = "ddp_launch.fleet"  # `--hosts`
COMPLETION = "ddp_launch.completion"  # scripts for shells
EVENT_SINK = "ddp_launch.event_sink"  # of the agent
BACKEND = "ddp_launch.backend"  # of torch.distributed, in ranks
LIBRARY = "ddp_launch.library"  # names of the package ddp, in ranks
TORCHRUN = "ddp_launch.torchrun"  # `torchrun --rdzv-backend NAME`
CTL_COMMAND = "ddp_launch.ctl_command"  # `ddpctl NAME ...`
SERVICE_COMMAND = "ddp_launch.service_command"  # `ddp-rendezvous NAME ...`
STORE_UPKEEP = "ddp_launch.store_upkeep"  # backups, restores and checks of a store of a wing
HISTORY = "ddp_launch.history"  # finished jobs that no service keeps: of the agent and of ddpctl

_OURS = "ddp_launch_wings"


class WingMissing(ImportError):
    """A name stands in the table or in the metadata of a package, and its module does not exist."""

    code = "DDP-1019"


def find(door: str, name: str) -> "Any":
    """What stands behind the door under this name; None if nothing does."""
    value = names(door).get(name) or others(door).get(name)
    return load(door, name, value) if value else None


def names(door: str) -> dict[str, str]:
    """The names behind this door in the table, each with its module and attribute."""
    found: dict[str, str] = {}
    group = ""
    table = os.path.join(os.path.dirname(os.path.abspath(__file__)), _OURS, "entry_points.txt")
    for line in _text(table).splitlines():
        if line.startswith("["):
            group = line.strip("[]")
        elif group == door and "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found[name.strip()] = value.strip()
    return found


def others(door: str) -> dict[str, str]:
    """The names that other packages have put behind this door, as in `names`."""
    if not others_may_name(door):
        return {}
    from importlib import metadata

    ours = names(door)
    points = metadata.entry_points(group=door)
    return {point.name: point.value for point in points if point.name not in ours}


def others_may_name(group: str) -> bool:
    """Whether another package may have entry points in this group. `importlib.metadata` takes ten times as long."""
    for folder in sys.path:
        try:
            entries = os.listdir(folder or ".")
        except OSError:
            continue
        for entry in entries:
            is_one = entry.endswith((".dist-info", ".egg-info")) and not entry.startswith("ddp_launch-")
            if is_one and f"[{group}]" in _text(os.path.join(folder, entry, "entry_points.txt")):
                return True
    return False


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def load(door: str, name: str, value: str) -> "Any":
    from importlib import import_module

    module, _, attribute = value.partition(":")
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # a package that the wing needs
        raise WingMissing(_words_for(door, name, module)) from None
    for each in filter(None, attribute.split(".")):
        found = getattr(found, each)
    return found


def _words_for(door: str, name: str, module: str) -> str:
    package, _, rest = module.partition(".")
    wing = f"the wing {rest.partition('.')[0]}" if package == _OURS else f"the package {package}"
    again = f"{sys.executable} -m pip install --force-reinstall --no-deps ddp-launch"
    advice = "Install that package again, or remove it"
    if package == _OURS:
        advice = f"Install ddp-launch again: {again} (or, in a checkout: make install)"
    return f"{name} ({door}) is in {wing}, which is not installed: there is no {module}. {advice}"
