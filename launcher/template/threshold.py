"""First and last steps of the hook, in zygote and executed rank: they do not change the state that the script sees."""

from __future__ import annotations

import os
import sys


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
