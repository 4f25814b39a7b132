"""What happens in the interpreter of a rank before it starts the script: in a hook, or after a fork.

The hook's folder is on PYTHONPATH only until then. When the script starts, the environment and sys.path are what they
would have been without it, and the user's sitecustomize has been imported, if there is one. This file imports as little
as it can: an executed rank has all of it before its script begins.
"""

from __future__ import annotations

import os
import sys

from . import stack_signal

TYPE_CHECKING = False  # not from typing: the user may have a script called typing.py
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any


# Those of `contracts`, which imports typing and struct: the user may have scripts with these names, too.
DEBUG, DEBUG_IN_TERMINAL, DEBUG_OTHER, JOINS = "DDP_DEBUG", "terminal", "other", "DDP_JOINS"
VARIABLE = "_DDP_LAUNCH_RANK"  # the former PYTHONPATH after a "="; empty: it was not set
_HOOK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "hook")


def announce() -> None:
    """Prepare the environment in the process that is about to execute Python."""
    before = os.environ.get("PYTHONPATH")
    os.environ[VARIABLE] = "" if before is None else f"={before}"
    os.environ["PYTHONPATH"] = os.pathsep.join((_HOOK, before)) if before else _HOOK


def enter(hook_folder: str) -> None:
    """Restore the environment in that Python process."""
    before = os.environ.pop(VARIABLE)
    hide_hook(hook_folder, before[1:] if before else None)
    stack_signal.listen()
    follow_output()
    after_torch_import()
    enter_debugger()


# --- the hook leaves no trace ----------------------------------------------------------------------
#
# First and last steps of the hook, in zygote and executed rank: they do not change the state that the script sees.


def hide_hook(folder: str, pythonpath: str | None) -> None:
    sys.path[:] = [path for path in sys.path if path != folder]
    sys.path_importer_cache.pop(folder, None)
    if pythonpath is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = pythonpath


def import_users_sitecustomize() -> bool:
    ours = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = ours
        return False
    return True


def leave(hook_folder: str) -> None:
    """Remove what a script could see of the launcher."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "_ddp_launch"]:
        del sys.modules[name]
    here = os.path.dirname(hook_folder)
    sys.path_importer_cache.pop(here, None)
    lines = sys.modules.get("linecache")
    if lines is not None:
        for file in [file for file in lines.cache if file.startswith(here)]:
            del lines.cache[file]


# --- marks in torch --------------------------------------------------------------------------------
#
# Instruments torch's functions when a rank starts, so that an unchanged script writes to its status page.
#
# The files of the library inside a rank are loaded by path, under a private name: the script may use the name `ddp`
# for something else. A rank that was forked warm has torch by then. An executed rank gets the marks when it imports
# torch.
#
# A failure here must not fail the rank: the page then stays empty, and the script runs as usual.

_PACKAGE = "_ddp_launch_rank"
_GATE = "ddp.groups.joining:install"
_LIBRARY = os.path.normpath(os.path.join(os.path.abspath(__file__), "../../../ddp/telemetry"))


_torch_api: Any = None


def meets_in_a_file() -> bool:
    """Whether the ranks have met in a file (`file://`). The destructor of its store removes it after the last rank."""
    return _torch_api is not None and bool(_torch_api.meets_in_a_file())


def load() -> Callable[[], None]:
    """Return a function that installs the marks, to be called once there is a page and torch."""
    if "t" in sys.abiflags:  # a free-threaded interpreter (PYTHON_EXEC): the compiled page would end it
        return _nothing
    global _torch_api
    package: Any = type(sys)(_PACKAGE)
    package.__path__ = [_LIBRARY]
    sys.modules[_PACKAGE] = package
    try:
        from _ddp_launch_rank import torch_api, torch_marks

        _torch_api = torch_api
    except Exception:  # the library is not installed here, or not for this interpreter
        return _nothing
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]:
            del sys.modules[name]
        sys.path_importer_cache.pop(_LIBRARY, None)

    def carefully() -> None:
        for install in (torch_marks.install, _close_gate):
            try:
                install()
            except Exception:
                pass

    return carefully


def _close_gate() -> None:
    """Let a rank that joins survivors of a failure not communicate before it has joined them.

    The library is looked up by name, as torch looks up a plug-in: the launcher itself does not depend on it.
    """
    if os.environ.get(JOINS) != "1":
        return
    from importlib.util import find_spec
    from pkgutil import resolve_name

    found = find_spec("ddp")
    ours = os.path.join(os.path.dirname(_LIBRARY), "__init__.py")
    if found is not None and found.origin is not None and os.path.samefile(found.origin, ours):
        resolve_name(_GATE)()


def _nothing() -> None:
    pass


def join_instead_of_hosting() -> None:
    """Connect a script that creates a TCPStore server at MASTER_ADDR:MASTER_PORT to the launcher's store instead."""
    import torch.distributed as dist

    original = dist.TCPStore.__init__

    def init(self: Any, host_name: str, port: int, *args: Any, **kwargs: Any) -> None:
        if str(port) == os.environ.get("MASTER_PORT"):
            if "is_master" in kwargs:
                kwargs["is_master"] = False
            elif len(args) > 1:
                args = (args[0], False, *args[2:])
        original(self, host_name, port, *args, **kwargs)

    dist.TCPStore.__init__ = init  # type: ignore[method-assign]


def after_torch_import() -> None:
    """Load the rest only after torch: files in the script's folder can no longer hide what torch has imported."""
    sys.meta_path.insert(0, _Awaiting())


class _Awaiting:
    """An import finder that delegates to the other finders, and runs a function after the import of torch."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path)
        spec = next((each for each in found if each is not None), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Following(spec.loader)  # type: ignore[assignment]
        return spec


class _Following:
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: Any) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        load()()
        if os.environ.get("RANK") == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            join_instead_of_hosting()


# --- the size of the terminal ----------------------------------------------------------------------
#
# The size of its terminal in a rank: that of the output, where rich asks the input first.
#
# A rank reads from the terminal of the command, and writes to a terminal of its own. That one is narrower, because
# each row has a label. Of a rank without this, the rows that rich fills would be wrapped.

_STDIN, _STDOUT, _STDERR = 0, 1, 2


def follow_output() -> None:
    """Return the size of the output for stdin too, if both are terminals and differ."""
    if not os.isatty(_STDIN):
        return
    shown = next((fd for fd in (_STDOUT, _STDERR) if _is_another_terminal(fd)), None)
    if shown is None:
        return
    size_of = os.get_terminal_size

    def get_terminal_size(fd: int = _STDOUT, /) -> os.terminal_size:
        size = size_of(fd)
        try:
            return size_of(shown) if fd == _STDIN else size
        except OSError:  # the script has redirected its output
            return size

    os.get_terminal_size = get_terminal_size


def _is_another_terminal(fd: int) -> bool:
    return os.isatty(fd) and os.fstat(fd).st_rdev != os.fstat(_STDIN).st_rdev


# --- a rank that is debugged -----------------------------------------------------------------------
#
# What a rank does before its script starts if one rank of the job is debugged (`ddp-launch --debug`).
#
# The rank that is debugged has the keyboard to itself, and ends in the debugger if an exception ends its script; or
# it waits for an editor. The other ranks read nothing from the keyboard, and `breakpoint()` does nothing in them.


def keep_from_keyboard(env: dict[str, str]) -> None:
    """In any process that becomes a rank, also one that is not Python."""
    if env.get(DEBUG) == DEBUG_OTHER:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)


def enter_debugger() -> None:
    """In the Python process of a rank."""
    mode = os.environ.get(DEBUG, "")
    if mode == DEBUG_OTHER:
        os.environ["PYTHONBREAKPOINT"] = "0"
    elif mode == DEBUG_IN_TERMINAL:
        sys.excepthook = _examine
    elif mode:
        _wait_for_editor(mode)


def _examine(kind: Any, error: Any, trace: Any) -> None:
    sys.__excepthook__(kind, error, trace)
    if trace is not None and issubclass(kind, Exception) and sys.stdin is not None and sys.stdin.isatty():
        import pdb

        sys.stderr.write(
            "ddp-launch: the script has ended with this exception; pdb shows where, q ends the rank\n"
        )
        pdb.post_mortem(trace)


def _wait_for_editor(address: str) -> None:
    host, _, port = address.rpartition(":")
    rank = os.environ.get("RANK", "?")
    try:
        debugpy: Any = __import__("debugpy")
        debugpy.listen((host, int(port)))
    except Exception as error:  # not installed for this interpreter, or the port is in use
        sys.stderr.write(f"ddp-launch: rank {rank} cannot wait for a debugger at {address}: {error}\n")
        os._exit(1)
    sys.stderr.write(f"ddp-launch: rank {rank} waits for a debugger at {address} (pid {os.getpid()})\n")
    sys.stderr.flush()
    debugpy.wait_for_client()
