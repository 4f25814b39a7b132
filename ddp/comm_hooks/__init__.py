"""Communication hooks: how a bucket of gradients is averaged, other than by an all-reduce of all of it.

All are of torch's form, `hook(state, bucket) -> Future[Tensor]`, for `register_comm_hook` of our DDP and of torch's,
over any backend. Where a hook takes no state of its own, its state is the process group, or None for the default one.

A hook that changes gradients by more than rounding keeps, for each parameter, the error that it made, and adds it to
the next gradient ("error feedback"). That memory follows the parameter, not the bucket: buckets are made anew after
the first step. It is no part of a pickle, which holds the settings and the count of steps; `state_dict(module)` and
`load_state_dict(module, saved)` have it under the parameters' names.
"""

from ddp.comm_hooks.casting import bf16, bf16_around, fp16, fp16_around
from ddp.comm_hooks.gossip import Gossip, gossip_grad
from ddp.comm_hooks.plain import all_reduce, noop
from ddp.comm_hooks.power import PowerSGD, power_sgd
from ddp.comm_hooks.quantized import Quantized, quantized
from ddp.comm_hooks.top_k import TopK, top_k

__all__ = [
    "Gossip",
    "PowerSGD",
    "Quantized",
    "TopK",
    "all_reduce",
    "bf16",
    "bf16_around",
    "fp16",
    "fp16_around",
    "gossip_grad",
    "noop",
    "power_sgd",
    "quantized",
    "top_k",
]
