"""Communication hooks: other ways to average a bucket of gradients than an all-reduce of the whole bucket.

All hooks have torch's signature, `hook(state, bucket) -> Future[Tensor]`. They work with `register_comm_hook` of our
DDP and of torch's, over any backend. Hooks without settings take the process group as their state, or None for the
default group.

A lossy hook stores the compression error of each parameter and adds it to the next gradient ("error feedback"). This
memory belongs to the parameter, not to the bucket, because buckets are rebuilt after the first step. A pickle of the
state contains the settings and the step count, but not the memory. To save the memory under the names of the
parameters, use `state_dict(module)` and `load_state_dict(module, saved)`.
"""

from ddp.comm_hooks.gossip import Gossip, gossip_grad
from ddp.comm_hooks.plain import all_reduce, bf16, bf16_around, fp16, fp16_around, noop
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
