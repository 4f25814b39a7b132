"""What can be seen to go wrong before anything starts: the entry point, ports, folders.

Each check returns quietly or raises `UsageError`. None of them imports or runs the user's code, and
none changes anything: a folder that has to be made is only checked for whether it can be.
"""

from __future__ import annotations

import os
import stat
import sys
from typing import TYPE_CHECKING, NoReturn

from launcher.settings.arguments import UsageError
from launcher.settings.config_file import shown_reason
from launcher.settings.spec import EntryKind, EntryPoint
from launcher.settings.values import nearest, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from launcher.settings.config import Setting, Settings

_READ_AT_MOST = 2 << 20  # larger source is left to the ranks to compile
_LISTED_AT_MOST = 5000  # files of a folder looked through for a similar name


def check_entry(entry: EntryPoint, python: str, environ: Mapping[str, str], flag: str) -> None:
    """`flag`: how a module or program was asked for, for messages. `python` "": our own interpreter."""
    if not entry.target.strip():
        raise UsageError("the script's name is empty; write ddp-launch [options] script.py [args ...]")
    match entry.kind:
        case EntryKind.PROGRAM:
            check_program(entry.target, environ, f"{flag} {shown(entry.target)}")
        case EntryKind.MODULE:
            check_python(python, environ)
            check_module(entry.target, python, f"{flag} {shown(entry.target)}")
        case EntryKind.SCRIPT | EntryKind.RUN_PATH:
            check_python(python, environ)
            comes_first = " without --run-path, which comes first"
            check_script(entry.target, python, comes_first if entry.kind is EntryKind.RUN_PATH else "")


def check_folder() -> str:
    try:
        return os.getcwd()
    except OSError:
        raise UsageError("the current folder no longer exists; cd into one that does") from None


def check_python(python: str, environ: Mapping[str, str]) -> None:
    if python:
        check_program(python, environ, f"PYTHON_EXEC={shown(python)}")


# --- scripts -----------------------------------------------------------------------------------------


def check_script(path: str, python: str = "", how_for_a_program: str = "") -> None:
    if path == "-":
        raise UsageError("-: several ranks cannot read one script from standard input; save it in a file")
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            _check_script_folder(path)
        elif stat.S_ISREG(mode):  # a pipe or device can be read only once, by the rank
            with open(path, "rb") as file:
                data = file.read(_READ_AT_MOST + 1)
            if not python and len(data) <= _READ_AT_MOST:
                _check_source(path, data, f"for a program give --no-python{how_for_a_program}")
    except (FileNotFoundError, NotADirectoryError):
        _no_script(path)
    except OSError as error:
        raise UsageError(
            f"{shown(path)}: cannot be read ({error.strerror}); check the path and its rights"
        ) from None


def _check_script_folder(path: str) -> None:
    inside = os.listdir(path)
    if not any(name in inside for name in ("__main__.py", "__main__.pyc")):
        candidates = sorted(name for name in inside if name.endswith(".py"))
        hint = (
            f"name a script, e.g. {shown(os.path.join(path, candidates[0]))}"
            if candidates
            else "name a script"
        )
        raise UsageError(f"{shown(path)}: a folder without __main__.py; {hint}")


def _no_script(path: str) -> NoReturn:
    folder, name = os.path.split(path)
    if folder and not os.path.isdir(folder):
        raise UsageError(f"{shown(path)}: there is no folder {shown(folder)}; check the path")
    close = nearest(name, _names_in(folder or "."))
    hint = f"did you mean {shown(os.path.join(folder, close))}?" if close else "check the path"
    raise UsageError(f"{shown(path)}: there is no such script; {hint}")


def _names_in(folder: str) -> list[str]:
    """Names to choose a hint from; none when the folder may not be listed."""
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry, _ in zip(entries, range(_LISTED_AT_MOST), strict=False)]
    except OSError:
        return []


def _check_source(path: str, data: bytes, hint: str) -> None:
    """`data` as python would take it: source, a compiled file or a zip with a __main__."""
    if b"\0" in data or data[:4] == b"PK\x03\x04":
        if not _is_compiled(data) and not _is_zip_to_run(path):
            raise UsageError(f"{shown(path)}: binary, no Python script; {hint}")
        return
    if data.startswith(b"#!") and b"python" not in data.split(b"\n", 1)[0]:
        raise UsageError(f"{shown(path)}: a script, but of another language; {hint}")
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks will show them
            compile(data, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        line = f"line {error.lineno}: " if error.lineno else ""
        raise UsageError(f"{shown(path)}: {line}does not compile: {shown_reason(error.msg)}") from None
    except (ValueError, UnicodeError) as error:
        raise UsageError(f"{shown(path)}: no Python source: {shown_reason(str(error))}") from None
    except (RecursionError, MemoryError):
        pass  # a rank has more room, or says so itself


def _is_compiled(data: bytes) -> bool:
    from importlib.util import MAGIC_NUMBER

    return data.startswith(MAGIC_NUMBER)


def _is_zip_to_run(path: str) -> bool:
    import zipimport

    try:
        return zipimport.zipimporter(path).find_spec("__main__") is not None
    except zipimport.ZipImportError:
        return False


# --- modules and programs ----------------------------------------------------------------------------


def check_module(name: str, python: str, quoted: str) -> None:
    """Finds the top-level package without importing it; only our own interpreter can be asked."""
    bare = name.removesuffix(".py").replace("/", ".")
    if "/" in name or (name.endswith(".py") and os.path.exists(name)):
        raise UsageError(f"{quoted}: a file, no module; write -m {shown(bare)}, or leave -m out")
    if python:
        return
    top = name.partition(".")[0]
    found = _find(top) if top else None
    if found is None:
        raise UsageError(
            f"{quoted}: there is no module {shown(top)} here or in {shown(sys.prefix)}; {_install(top)}"
        )
    folders, is_package = found
    if top == name and is_package and not _has_main(folders):
        raise UsageError(
            f"{quoted}: a package without __main__.py; name a module inside it, e.g. -m {top}.train"
        )


def _install(top: str) -> str:
    close = nearest(top, [name.removesuffix(".py") for name in _names_in(".")])
    return f"did you mean -m {shown(close)}?" if close else "check the spelling, the folder and PYTHONPATH"


def _find(top: str) -> tuple[list[str], bool] | None:
    """Where `import top` would find it in a rank, whose path starts with the current folder."""
    from importlib.machinery import PathFinder

    here = [] if sys.flags.safe_path else [os.getcwd()]
    for finder in sys.meta_path:
        if finder is PathFinder:
            spec = PathFinder.find_spec(top, [*here, *sys.path[1:]])
        else:
            spec = finder.find_spec(top, None)
        if spec is not None:
            return list(spec.submodule_search_locations or ()), spec.submodule_search_locations is not None
    return None


def _has_main(folders: list[str]) -> bool:
    from importlib.machinery import PathFinder

    return PathFinder.find_spec("__main__", folders) is not None


def check_program(name: str, environ: Mapping[str, str], quoted: str) -> None:
    if "/" in name:
        places = [name]
    else:
        places = [os.path.join(folder or ".", name) for folder in os.get_exec_path(dict(environ))]
    files = [place for place in places if os.path.isfile(place)]
    if any(os.access(place, os.X_OK) for place in files):
        return
    if files:
        raise UsageError(f"{quoted}: may not be executed; chmod +x {shown(files[0])}")
    if "/" in name:
        problem = "a folder" if os.path.isdir(name) else "there is no such program"
        raise UsageError(f"{quoted}: {problem}; check the path")
    hint = f"write ./{shown(name)}" if os.path.isfile(name) else "check the name, or give its path"
    raise UsageError(f"{quoted}: no such program on PATH; {hint}")


# --- ports and folders -------------------------------------------------------------------------------


def check_port(setting: Setting, max_nodes: int) -> None:
    """On one machine the port must be free now; on several only node rank 0 could tell."""
    if not setting.value or max_nodes > 1:
        return
    import errno
    import socket

    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, setting.value))
                probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise setting.wrong("the port is in use", "leave it out and a free one is taken") from None
            if error.errno in (errno.EACCES, errno.EPERM):
                raise setting.wrong(
                    "only root may use this port", "take one from 1024, or leave it out"
                ) from None


def check_log_dir(setting: Setting) -> None:
    if not setting.given:
        return
    path = os.path.abspath(setting.value)
    try:
        while not _exists(path):
            path = os.path.dirname(path)
        mode = os.stat(path).st_mode
    except OSError as error:
        raise setting.wrong(f"cannot be made ({error.strerror})", "name another folder") from None
    where = "" if path == os.path.abspath(setting.value) else f"{shown(path)} is "
    if not stat.S_ISDIR(mode):
        raise setting.wrong(f"{where}a file, no folder", "name a folder, it is made when missing")
    if not os.access(path, os.W_OK | os.X_OK):
        raise setting.wrong(f"{where}not writable", "name a folder you may write to")


def _exists(path: str) -> bool:
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def check_surroundings(settings: Settings) -> None:
    check_port(settings.of("master_port"), 1 if settings["standalone"] else settings["nnodes"][1])
    check_log_dir(settings.of("log_dir"))
