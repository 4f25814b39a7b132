"""Check the entry point, ports and directories before anything starts.

Each check returns None or raises `UsageError`. A check does not import or run the user's code and does not change
anything: for a directory that does not exist yet, it checks only whether it can be created.
"""

from __future__ import annotations

import os
import re
import resource
import stat
import sys
from collections.abc import Mapping
from typing import NoReturn

import _ddp_launch_entry as doors
from launcher.settings.arguments import UsageError
from launcher.settings.config import ConfigFile, Setting, Settings, config_from
from launcher.settings.import_path import import_path
from launcher.settings.options import BY_SPELLING
from launcher.settings.spec import EntryKind, EntryPoint, LaunchSpec
from launcher.settings.values import nearest, printable
from rendezvous.values.contracts import CANNOT_RUN
from rendezvous.values.error_codes import Code

_READ_AT_MOST = 2 << 20  # bytes; the ranks alone compile a larger source
_LISTED_AT_MOST = 5000  # files of a directory that are searched for a similar name


class MachineTooSmall(UsageError):
    exit_code = CANNOT_RUN
    code = Code.TOO_FEW_OPEN_FILES


def check_entry(entry: EntryPoint, python: str, environ: Mapping[str, str], flag: str) -> None:
    """`flag` is the option that selected a module or a program. `python` is "" for our own interpreter."""
    if not entry.target.strip():
        raise UsageError(
            "the script name is empty. Use ddp-launch [options] script.py [args ...].",
            code=Code.MISSING_SCRIPT,
        )
    match entry.kind:
        case EntryKind.PROGRAM:
            check_program(entry.target, environ, f"{flag} {printable(entry.target)}")
        case EntryKind.MODULE:
            check_python(python, environ)
            check_module(entry.target, python, f"{flag} {printable(entry.target)}", environ)
        case EntryKind.SCRIPT | EntryKind.RUN_PATH:
            check_python(python, environ)
            no_run_path = " without --run-path, which takes precedence"
            check_script(entry.target, python, no_run_path if entry.kind is EntryKind.RUN_PATH else "")


def check_folder() -> str:
    try:
        return os.getcwd()
    except OSError:
        raise UsageError(
            "the current directory no longer exists. Change to one that exists, then run the command again.",
            code=Code.FOLDER_UNUSABLE,
        ) from None


def check_python(python: str, environ: Mapping[str, str]) -> None:
    if python:
        check_program(python, environ, f"PYTHON_EXEC={printable(python)}")


# --- scripts -----------------------------------------------------------------------------------------


# No script has such options by itself.
_OF_LAUNCHERS = (
    "--nproc",
    "--nnodes",
    "--node-rank",
    "--rdzv",
    "--rendezvous",
    "--max-restarts",
    "--master-",
)


def misplaced_option(entry: EntryPoint) -> str:
    """A warning if the first word after a script is an option of ours of which the script does not know."""
    first = entry.args[0].partition("=")[0] if entry.args and entry.kind is EntryKind.SCRIPT else ""
    if first not in BY_SPELLING or not first.startswith(_OF_LAUNCHERS):
        return ""
    with open(entry.target, "rb") as file:
        text = file.read(_READ_AT_MOST)
    words = first[2:].encode()
    if words in text or words.replace(b"-", b"_") in text:
        return ""
    return f"{first} stands after {printable(entry.target)}, so the script gets it. Put options of ddp-launch before it"


def check_script(path: str, python: str = "", how_for_a_program: str = "") -> None:
    if path == "-":
        raise UsageError(
            "invalid script '-': several ranks cannot read one script from standard input. Save it to a file.",
            code=Code.NOT_A_SCRIPT,
        )
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            _check_script_folder(path)
        elif stat.S_ISREG(mode):  # a pipe or device can be read only once, by the rank
            with open(path, "rb") as file:
                data = file.read(_READ_AT_MOST + 1)
            if not python and len(data) <= _READ_AT_MOST:
                _check_source(path, data, f"If it is a program, use --no-python{how_for_a_program}.")
    except (FileNotFoundError, NotADirectoryError):
        _no_script(path)
    except OSError as error:
        raise UsageError(
            f"cannot read {printable(path)}: {error.strerror}. Check the path and its permissions.",
            code=Code.SCRIPT_NOT_FOUND,
        ) from None


def _check_script_folder(path: str) -> None:
    inside = os.listdir(path)
    if not any(name in inside for name in ("__main__.py", "__main__.pyc")):
        candidates = sorted(name for name in inside if name.endswith(".py"))
        hint = (
            f"Use a script, for example {printable(os.path.join(path, candidates[0]))}."
            if candidates
            else "Use the path of a script."
        )
        raise UsageError(
            f"cannot run {printable(path)}: it is a directory without __main__.py. {hint}",
            code=Code.NOT_A_SCRIPT,
        )


def _no_script(path: str) -> NoReturn:
    folder, name = os.path.split(path)
    if folder and not os.path.isdir(folder):
        raise UsageError(
            f"cannot find script {printable(path)}: directory {printable(folder)} does not exist. Check the path.",
            code=Code.SCRIPT_NOT_FOUND,
        )
    if re.fullmatch(r"[\w.-]*:\d+", path):
        raise UsageError(
            f"script {printable(path)} does not exist. If it is the address of the page: --web takes none, and chooses "
            "a port of 127.0.0.1; `ddp-rendezvous serve --web` takes one. If it is that of the rendezvous, use "
            f"--rendezvous {printable(path)}.",
            code=Code.SCRIPT_NOT_FOUND,
        )
    named = {each.removesuffix(".py"): each for each in _names_in(folder or ".")}
    close = named.get(nearest(name.removesuffix(".py"), named) or "")
    hint = f"Did you mean {printable(close)}, in the same folder?" if close else "Check the path."
    raise UsageError(f"script {printable(path)} does not exist. {hint}", code=Code.SCRIPT_NOT_FOUND)


def _names_in(folder: str) -> list[str]:
    """Names to choose a suggestion from; empty if the directory cannot be listed."""
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry, _ in zip(entries, range(_LISTED_AT_MOST), strict=False)]
    except OSError:
        return []


def _check_source(path: str, data: bytes, hint: str) -> None:
    """Accept what Python can run: source, a compiled file, or a zip file with a __main__."""
    if b"\0" in data or data[:4] == b"PK\x03\x04":
        if not _is_compiled(data) and not _is_zip_to_run(path):
            raise UsageError(
                f"{printable(path)} is a binary file, not a Python script. {hint}", code=Code.NOT_A_SCRIPT
            )
        return
    if data.startswith(b"#!") and b"python" not in data.split(b"\n", 1)[0]:
        raise UsageError(
            f"{printable(path)} is not a Python script: its first line names another interpreter. {hint}",
            code=Code.NOT_A_SCRIPT,
        )
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks print them
            compile(data, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        line = f"line {error.lineno}: " if error.lineno else ""
        raise UsageError(
            f"{printable(path)}: {line}{one_line(error.msg)}. Fix the syntax error.", code=Code.NOT_A_SCRIPT
        ) from None
    except (ValueError, UnicodeError) as error:
        raise UsageError(
            f"{printable(path)} is not Python source: {one_line(str(error))}. {hint}", code=Code.NOT_A_SCRIPT
        ) from None
    except (RecursionError, MemoryError):
        pass  # a rank has more memory, or reports the error itself


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


def check_module(name: str, python: str, quoted: str, environ: Mapping[str, str]) -> None:
    """Find the top-level package without importing it, if the ranks use our own interpreter."""
    bare = name.removesuffix(".py").replace("/", ".")
    if "/" in name or (name.endswith(".py") and os.path.exists(name)):
        raise UsageError(
            f"invalid {quoted}: it is a file, not a module. Use -m {printable(bare)}, or remove -m.",
            code=Code.MODULE_NOT_FOUND,
        )
    if python:
        return
    top = name.partition(".")[0]
    found = _find(top, environ) if top else None
    if found is None:
        raise UsageError(
            f"invalid {quoted}: module {printable(top)} is not in the current directory or in {printable(sys.prefix)}. "
            f"{_suggestion(top)}",
            code=Code.MODULE_NOT_FOUND,
        )
    folders, is_package = found
    if top == name and is_package and not _has_main(folders):
        raise UsageError(
            f"invalid {quoted}: it is a package without __main__.py. "
            f"Use a module inside it, for example -m {top}.train.",
            code=Code.MODULE_NOT_FOUND,
        )


def _suggestion(top: str) -> str:
    close = nearest(top, [name.removesuffix(".py") for name in _names_in(".")])
    return (
        f"Did you mean -m {printable(close)}?"
        if close
        else "Check the name, the current directory and PYTHONPATH."
    )


def _find(top: str, environ: Mapping[str, str]) -> tuple[list[str], bool] | None:
    """Where `import top` finds the module in a rank, whose path starts with the current directory."""
    from importlib.machinery import PathFinder

    here = [] if sys.flags.safe_path else [os.getcwd()]
    for finder in sys.meta_path:
        if finder is PathFinder:
            spec = PathFinder.find_spec(top, [*here, *import_path(environ)])
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
        raise UsageError(
            f"invalid {quoted}: the file is not executable. Run chmod +x {printable(files[0])}.",
            code=Code.PROGRAM_NOT_RUNNABLE,
        )
    if "/" in name:
        problem = "it is a directory" if os.path.isdir(name) else "the program does not exist"
        raise UsageError(f"invalid {quoted}: {problem}. Check the path.", code=Code.PROGRAM_NOT_RUNNABLE)
    hint = (
        f"Use ./{printable(name)}."
        if os.path.isfile(name)
        else "Check the name, or use the path of the program."
    )
    raise UsageError(f"invalid {quoted}: the program is not on PATH. {hint}", code=Code.PROGRAM_NOT_RUNNABLE)


# --- ports and directories ---------------------------------------------------------------------------


def check_port(setting: Setting, max_nodes: int) -> None:
    """Check that the port is free if the job has one node; with more nodes only node rank 0 can check it."""
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
                raise setting.wrong(
                    "the port is in use", "remove the option to use any free port", code=Code.PORT_IN_USE
                ) from None
            if error.errno in (errno.EACCES, errno.EPERM):
                raise setting.wrong(
                    "only root may use this port",
                    "use port 1024 or higher, or remove the option to use any free port",
                    code=Code.PORT_IN_USE,
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
        raise setting.wrong(
            f"cannot create the directory ({error.strerror})",
            "use another directory",
            code=Code.FOLDER_UNUSABLE,
        ) from None
    subject = "it" if path == os.path.abspath(setting.value) else printable(path)
    if not stat.S_ISDIR(mode):
        raise setting.wrong(
            f"{subject} is a file, not a directory",
            "use a directory; it is created if it does not exist",
            code=Code.FOLDER_UNUSABLE,
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise setting.wrong(
            f"{subject} is not writable", "use a directory that you can write to", code=Code.FOLDER_UNUSABLE
        )


def _exists(path: str) -> bool:
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def check_open_files(settings: Settings, spec: LaunchSpec) -> None:
    """Reject the job if it needs more than the hard limit; the agent raises its own soft limit."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < spec.open_files:
        raise MachineTooSmall(
            f"{settings.of('nproc_per_node').quoted}: the agent needs {spec.open_files} open files for {spec.nproc} "
            f"ranks, but the hard limit is {hard}. Raise the limit (ulimit -Hn, LimitNOFILE=) or start fewer ranks.",
        )


def check_port_and_log_dir(settings: Settings) -> None:
    check_port(settings.of("master_port"), 1 if settings["standalone"] else settings["nnodes"][1])
    check_log_dir(settings.of("log_dir"))


def check_debugger(settings: Settings, python: str, nproc: int) -> None:
    """Find out before the ranks start whether there is such a rank and debugpy. Another interpreter tells by itself."""
    setting = settings.of("debug")
    if setting.value is None:
        return
    is_alone = settings["nnodes"][1] == 1  # other nodes may have other numbers of ranks
    if is_alone and setting.value.rank >= nproc:
        ranks = f"ranks of this job are 0 to {nproc - 1}" if nproc > 1 else "only rank of this job is 0"
        raise setting.wrong(f"the {ranks}", "use a rank that exists")
    if not setting.value.address or python:
        return
    from importlib.util import find_spec

    if find_spec("debugpy") is None:
        raise setting.wrong(
            "debugpy is not installed, and editors need it",
            f"run {sys.executable} -m pip install debugpy, or use --debug {setting.value.rank} for the terminal",
            code=Code.PACKAGE_MISSING,
        )


def check_wings(settings: Settings) -> None:
    """Find out before the ranks start whether what the options need is installed."""
    if settings["health_source"]:
        doors.find(doors.HEALTH_SOURCE, "any")
    if settings["preflight"] == "full" and settings["nnodes"][1] > 1:
        doors.find(doors.NODE_COMPARISON, "links")
    if settings["web"] and (missing := doors.find(doors.PAGE, "web").missing_packages()):
        raise UsageError(missing, code=Code.PACKAGE_MISSING)


# --- read the TOML file of `--config` ---------------------------------------------------------------

MAX_BYTES = 1 << 20


def read_config(asked: Setting) -> ConfigFile:
    """Read the file of `--config` or DDP_LAUNCH_CONFIG; an empty ConfigFile if neither is set."""
    if not asked.given:
        return ConfigFile()
    import tomllib

    path, name = str(asked.value), printable(str(asked.value))
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise asked.wrong(
                "the file is larger than 1 MiB", "use a TOML file of options", code=Code.CONFIG_FILE_INVALID
            )
        table = tomllib.loads(data.decode())
    except FileNotFoundError:
        raise asked.wrong("the file does not exist", "check the path", code=Code.FILE_UNREADABLE) from None
    except OSError as error:
        raise asked.wrong(
            f"cannot read the file ({error.strerror})",
            "check the path and its permissions",
            code=Code.FILE_UNREADABLE,
        ) from None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"{name}: line {line} is not UTF-8. Save the file as UTF-8.", code=Code.CONFIG_FILE_INVALID
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(
            f"{name} is not valid TOML: {one_line(str(error))}. Fix the syntax error.",
            code=Code.CONFIG_FILE_INVALID,
        ) from None
    except RecursionError:
        raise UsageError(
            f"{name} cannot be parsed: it is nested too deeply. Use flat keys.", code=Code.CONFIG_FILE_INVALID
        ) from None
    return config_from(name, table)


def one_line(reason: str) -> str:
    """The message of a library as one printable line."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in reason).split())
