"""The plain average, a hook that sends nothing, and the checks that all hooks share."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket

from ddp.reducer.grad_bucket import result_of
from ddp.telemetry.coded import WrongType

# --- the plain average, and what all hooks share ---------------------------------------------------

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
NUMBERS = (*FLOATS, torch.complex64, torch.complex128)


def all_reduce(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average as without a hook. Use it inside another hook, for example `fp16_around(all_reduce)`."""
    buffer = checked_buffer(bucket, "all_reduce", NUMBERS)
    group = group_of(state)
    work = dist.all_reduce(buffer.div_(group.size()), group=group, async_op=True)
    return after(work, lambda: buffer)


def after(work: Any, result: Callable[[], torch.Tensor]) -> torch.futures.Future[torch.Tensor]:
    """Return a future of `result()`, which is called when `work` has completed.

    The future raises the error of `work`: torch drops an error for which no callback asks.
    """

    def checked(done: torch.futures.Future[Any]) -> torch.Tensor:
        done.wait()
        return result()

    future: torch.futures.Future[torch.Tensor] = work.get_future().then(checked)
    return future


def noop(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Send nothing, to measure the cost of communication. Gradients stay local, so the replicas diverge."""
    return completed(bucket.buffer())


def group_of(state: Any) -> dist.ProcessGroup:
    group = dist.group.WORLD if state is None else state
    if not isinstance(group, dist.ProcessGroup):
        raise WrongType(
            f"invalid state of this communication hook: {type(group).__name__} is not a process group. "
            "Use a process group, or None for the default group"
        )
    return group


def completed(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future = future_for(tensor)
    future.set_result(tensor)
    return future


def future_for(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Create a future for a tensor on the same device as `tensor`."""
    devices: list[int | str | torch.device] = [] if tensor.device.type == "cpu" else [tensor.device]
    return torch.futures.Future(devices=devices)


def checked_buffer(bucket: GradBucket, hook: str, dtypes: tuple[torch.dtype, ...] = FLOATS) -> torch.Tensor:
    """Return the bucket's buffer. Raise if the hook does not support it, on all ranks: all have the same buckets."""
    buffer = bucket.buffer()
    problem = ""
    if buffer.is_sparse:
        problem = "the gradient is sparse"
    elif buffer.dtype not in dtypes:
        problem = f"the dtype of the gradient is {buffer.dtype}"
    if not problem:
        return buffer
    raise WrongType(
        f"the communication hook {hook} cannot average {describe(bucket)}: {problem}. It supports dense gradients "
        f"of {', '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)}. Use another hook, or exclude such "
        "parameters from DDP (their gradients are then not averaged) with "
        "DistributedDataParallel.ignore_parameters_and_buffers()"
    )


def describe(bucket: GradBucket) -> str:
    """Name the first parameter of a bucket, or give its shape: torch's buckets do not contain names."""
    names: list[str] = getattr(bucket, "names", list)()
    if names:
        return f"the parameter {names[0]!r}"
    return f"a parameter of shape {list(bucket.parameters()[0].shape)}"


# --- halves: fp16 and bf16 -------------------------------------------------------------------------
#
# Send gradients at half their size: as float16, or as bfloat16, which has the range of float32.
#
# Gradients are divided by the number of ranks before the cast. So the sum overflows only if a gradient is too large
# for float16.

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
