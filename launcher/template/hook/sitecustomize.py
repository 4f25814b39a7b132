"""Entered by the interpreter at the end of its start-up; see launcher/template/__init__.py for why."""

import sys

_modules_before_ours = frozenset(sys.modules)

import os  # noqa: E402


def _enter_zygote() -> bool:
    here = os.path.dirname(os.path.abspath(__file__))
    package = type(sys)("_ddp_launch")
    package.__path__ = [os.path.dirname(here)]
    sys.modules["_ddp_launch"] = package
    from _ddp_launch import warm

    users_own_exists: bool = warm.enter(here, _modules_before_ours)  # returns in a rank only
    return users_own_exists


try:
    _users_own_exists = _enter_zygote()
except BaseException:
    # Going on would run the user's script here, outside any job.
    import traceback

    traceback.print_exc()
    os._exit(70)
if not _users_own_exists:
    # The interpreter takes this as "there is no sitecustomize", which is what the script should find.
    raise ImportError("no sitecustomize", name="sitecustomize")
