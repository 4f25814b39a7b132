"""Send gradients at half their size: as float16, or as bfloat16, which has the range of float32.

Gradients are divided by the number of ranks before the cast. So the sum overflows only if a gradient is too large for
float16.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket

from ddp.comm_hooks.plain import after, checked_buffer, group_of
from ddp.reducer.grad_bucket import result_of

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


def fp16(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return _average_as(torch.float16, "fp16", state, bucket)


def bf16(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return _average_as(torch.bfloat16, "bf16", state, bucket)


def fp16_around(hook: Hook) -> Hook:
    """Run `hook` on a float16 copy of the bucket, and cast its result back."""
    return _around(torch.float16, "fp16_around", hook)


def bf16_around(hook: Hook) -> Hook:
    return _around(torch.bfloat16, "bf16_around", hook)


def _average_as(
    dtype: torch.dtype, name: str, state: Any, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    buffer = checked_buffer(bucket, name)
    group = group_of(state)
    small = (buffer / group.size()).to(dtype)
    work = dist.all_reduce(small, group=group, async_op=True)
    return after(work, lambda: buffer.copy_(small))


def _around(dtype: torch.dtype, name: str, hook: Hook) -> Hook:
    def cast(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = checked_buffer(bucket, name)
        bucket.set_buffer(buffer.to(dtype))
        return hook(state, bucket).then(lambda done: buffer.copy_(result_of(done)))

    cast.__name__ = cast.__qualname__ = f"{name}({getattr(hook, '__name__', type(hook).__name__)})"
    return cast
