"""Instruments torch's functions when a rank starts, so that an unchanged script writes to its status page.

The files of the library inside a rank are loaded by path, under a private name: the script may use the name `ddp` for
something else. A rank that was forked warm has torch by then. An executed rank gets the marks when it imports torch.

A failure here must not fail the rank: the page then stays empty, and the script runs as usual.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # not from typing: the user may have a script called typing.py
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

_PACKAGE = "_ddp_launch_rank"
_GATE = "ddp.groups.joining:install"
_LIBRARY = os.path.normpath(os.path.join(os.path.abspath(__file__), "../../../ddp/telemetry"))


def load() -> Callable[[], None]:
    """Return a function that installs the marks, to be called once there is a page and torch."""
    if "t" in sys.abiflags:  # a free-threaded interpreter (PYTHON_EXEC): the compiled page would end it
        return _nothing
    package: Any = type(sys)(_PACKAGE)
    package.__path__ = [_LIBRARY]
    sys.modules[_PACKAGE] = package
    try:
        from _ddp_launch_rank import torch_marks
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
    if os.environ.get("DDP_JOINS") != "1":
        return
    from importlib.util import find_spec
    from pkgutil import resolve_name

    found = find_spec("ddp")
    ours = os.path.join(os.path.dirname(_LIBRARY), "__init__.py")
    if found is not None and found.origin is not None and os.path.samefile(found.origin, ours):
        resolve_name(_GATE)()


def _nothing() -> None:
    pass


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
