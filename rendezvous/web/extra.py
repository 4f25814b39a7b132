"""Whether the packages of the page are installed. Imports none of them."""

from __future__ import annotations

from importlib.util import find_spec

_PACKAGES = ("starlette", "uvicorn")


def missing_packages() -> str:
    """What to do, for the user; empty if nothing is missing."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if not missing:
        return ""
    return f"--web needs {' and '.join(missing)}, which are not installed: pip install 'ddp-launch[web]'"
