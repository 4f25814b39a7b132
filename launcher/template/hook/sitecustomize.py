"""Imported by the interpreter at the end of its start-up; see launcher/template/__init__.py for why."""

import sys

_modules_before_ours = frozenset(sys.modules)

import os  # noqa: E402


def _ours_by_path(here: str) -> None:
    package = type(sys)("_ddp_launch")
    package.__path__ = [os.path.dirname(here)]
    sys.modules["_ddp_launch"] = package


def _enter_zygote(here: str) -> bool:
    from _ddp_launch import warm

    users_own_exists: bool = warm.enter(here, _modules_before_ours)  # returns in a rank only
    return users_own_exists


def _enter_rank(here: str) -> bool:
    """An error here does not affect the rank; the launcher only loses its status data."""
    from _ddp_launch import script_start

    try:
        script_start.enter(here)
    except Exception:
        pass
    users_own_exists: bool = script_start.import_users_sitecustomize()
    script_start.leave(here)
    return users_own_exists


_here = os.path.dirname(os.path.abspath(__file__))
_is_zygote = "_DDP_LAUNCH_ZYGOTE" in os.environ
try:
    _ours_by_path(_here)
    _users_own_exists = _enter_zygote(_here) if _is_zygote else _enter_rank(_here)
except BaseException:
    if not _is_zygote:
        raise  # the user's own sitecustomize: its errors are the user's to see
    # Going on would run the user's script here, outside any job.
    import traceback

    traceback.print_exc()
    os._exit(70)
if not _users_own_exists:
    # The interpreter takes this as "there is no sitecustomize", which is what the script should find.
    raise ImportError("no sitecustomize", name="sitecustomize")
