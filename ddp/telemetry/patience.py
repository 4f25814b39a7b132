"""Long timeouts for process groups while a person debugs one rank: the others wait for it in a collective.

The launcher sets DDP_DEBUG in all ranks. torch's functions are wrapped rather than given other defaults, because a
script may pass a timeout of its own.
"""

from __future__ import annotations

import functools
import os
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

VARIABLE = "DDP_DEBUG"
LONG = timedelta(days=7)
_FUNCTIONS = ("init_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration")


def install() -> None:
    """Wrap the functions that make groups, if a rank is debugged. torch must be imported."""
    if not os.environ.get(VARIABLE):
        return
    import torch.distributed

    modules = [torch.distributed, sys.modules.get("torch.distributed.distributed_c10d")]
    for name in _FUNCTIONS:
        original = getattr(modules[0], name, None)
        if callable(original):
            patient = _patient(original)
            for module in modules:
                if getattr(module, name, None) is original:
                    setattr(module, name, patient)


def _patient(make: Callable[..., Any]) -> Callable[..., Any]:
    import inspect

    signature = inspect.signature(make)

    @functools.wraps(make)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError:
            return make(*args, **kwargs)  # which raises it for the script
        given.arguments["timeout"] = LONG
        return make(*given.args, **given.kwargs)

    return wrapped
