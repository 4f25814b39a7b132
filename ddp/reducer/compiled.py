"""What torch.compile sees of a wrapped module.

A forward communicates before and after the module's own forward. torch.compile cannot trace that: it stops there, and
compiles the module's own forward, which it splits at the buckets. With `fullgraph=True` it must not stop, and raises
an error with the reason from here.

With `torch._dynamo.config.optimize_ddp = "python_reducer"`, torch averages gradients in hooks that it compiles along,
and the forward has nothing else to do. Then an instance uses the two methods of torch's class, which can be traced.
"""

from __future__ import annotations

import inspect
from functools import cache
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from ddp.telemetry import torch_api, torch_names

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

_FORWARD_METHODS = (torch_names.PRE_FORWARD, torch_names.POST_FORWARD)
_NOT_TRACEABLE = (
    "DistributedDataParallel communicates before and after each forward, which torch.compile cannot trace. "
    "For one graph without breaks (fullgraph=True), compile the module before you wrap it, or set "
    "torch._dynamo.config.optimize_ddp = 'python_reducer' before you wrap it."
)


@cache
def hide_communication(wrapper: type) -> None:
    """Let torch.compile stop at the communication of this class, with a reason. It must have both methods itself."""
    disable: Any = torch.compiler.disable
    for name in _FORWARD_METHODS:
        hidden = disable(vars(wrapper)[name.name], reason=_NOT_TRACEABLE)
        setattr(wrapper, name.name, hidden)


def forward_as_torch(module: DistributedDataParallel) -> None:
    """Let an instance use torch's methods, without the marks on them, so that they can be traced."""
    for name in _FORWARD_METHODS:
        module.__dict__[name.name] = MethodType(inspect.unwrap(torch_api.get(name)), module)


def forget_forward(state: dict[str, object]) -> None:
    """Remove these methods from the state of an instance: they belong to it alone."""
    for name in _FORWARD_METHODS:
        state.pop(name.name, None)
