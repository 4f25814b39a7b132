"""PowerSGD (Vogels, Karimireddy, Jaggi 2019): send a gradient matrix M as two thin factors, M ~ P Q'.

Each step does one step of subspace iteration: P = mean of M Q over the ranks, orthonormalized; Q = mean of M' P. The
average is P Q'. The next step starts from this Q, so the approximation improves while the gradients change slowly. The
approximation error is added to the next gradient. Vectors, and matrices that are too small to gain from this, are sent
uncompressed, in the same all-reduce as P.
"""

from functools import cache

import torch
import torch.distributed as dist
from torch.distributed import GradBucket

from ddp.comm_hooks.plain import checked_buffer
from ddp.comm_hooks.resumable import HookMemory, Resumable
from ddp.comm_hooks.staged import Stages
from ddp.reducer.device import to_device
from ddp.telemetry.coded import WrongValue

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class PowerSGD(Resumable):
    """State of `power_sgd`.

    `rank`: the rank of the approximation, which is the number of columns of P and Q. `start_step`: how many steps to
    average without compression first, because early
    gradients are not of low rank. `min_compression`: compress a matrix only if this makes it smaller by more than this
    factor. `warm_start`: start from the factors of the previous step.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        rank: int = 1,
        start_step: int = 1000,
        *,
        min_compression: float = 2.0,
        error_feedback: bool = True,
        warm_start: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(process_group)
        if rank < 1:
            raise WrongValue(f"invalid rank={rank} of the matrices: not a positive number. Use 1 or more")
        if start_step < 0:
            raise WrongValue(
                f"invalid start_step={start_step}: negative. Use 0 to compress from the first step"
            )
        self.rank = rank
        self.start_step = start_step
        self.min_compression = min_compression
        self.error_feedback = error_feedback
        self.warm_start = warm_start
        self.seed = seed
        self.factors = HookMemory()

    def memories(self) -> dict[str, HookMemory]:
        return {**super().memories(), "factors": self.factors}

    @property
    def remembers(self) -> bool:
        return True

    def compresses(self, shape: torch.Size) -> bool:
        if len(shape) < 2 or not shape.numel():
            return False
        rows, columns = shape[0], shape.numel() // shape[0]
        rank = min(self.rank, rows, columns)
        return (rows + columns) * rank * self.min_compression < rows * columns


def power_sgd(state: PowerSGD, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    buffer = checked_buffer(bucket, "power_sgd")
    parameters = bucket.parameters()
    if state.step < state.start_step:
        return state.run(bucket, _average(state, buffer))
    return state.run(bucket, _compress(state, buffer, parameters, bucket.index()))


def _average(state: PowerSGD, buffer: torch.Tensor) -> Stages:
    buffer.div_(state.group.size())
    yield [dist.all_reduce(buffer, group=state.group, async_op=True)]
    return buffer


def _compress(state: PowerSGD, buffer: torch.Tensor, parameters: list[torch.Tensor], index: int) -> Stages:
    size = state.group.size()
    numel = sum(parameter.numel() for parameter in parameters)
    gradient = buffer[:numel].to(_WIDE.get(buffer.dtype, buffer.dtype), copy=True)
    if state.error_feedback:
        state.errors.add_to(gradient, parameters)
    pieces = list(torch.split(gradient, [parameter.numel() for parameter in parameters]))
    thin = [i for i, parameter in enumerate(parameters) if state.compresses(parameter.shape)]
    matrices = [pieces[i].view(parameters[i].shape[0], -1) for i in thin]
    whole = [pieces[i] for i in range(len(pieces)) if i not in set(thin)]

    q = _first_factors(state, [parameters[i] for i in thin], matrices, index)
    first = _concatenate([*whole, *(m @ each for m, each in zip(matrices, q, strict=True))], gradient).div_(
        size
    )
    yield [dist.all_reduce(first, group=state.group, async_op=True)]

    shapes = [(m.shape[0], each.shape[1]) for m, each in zip(matrices, q, strict=True)]
    averages = _split(first, [*(piece.shape for piece in whole), *shapes])
    p = [torch.linalg.qr(each).Q for each in averages[len(whole) :]]
    second = _concatenate([m.T @ each for m, each in zip(matrices, p, strict=True)], gradient).div_(size)
    if matrices:
        yield [dist.all_reduce(second, group=state.group, async_op=True)]

    q = _split(second, [each.shape for each in q])
    average = torch.empty_like(gradient)
    into = torch.split(average, [parameter.numel() for parameter in parameters])
    for i, left, right in zip(thin, p, q, strict=True):
        torch.mm(left, right.T, out=into[i].view(left.shape[0], -1))
        state.factors.put(parameters[i], right.clone())
    _keep_errors(state, gradient, into, thin, parameters)
    for i, value in zip([i for i in range(len(pieces)) if i not in set(thin)], averages, strict=False):
        into[i].copy_(value)
    buffer[:numel].copy_(average)
    return buffer


def _keep_errors(
    state: PowerSGD,
    gradient: torch.Tensor,
    approximations: tuple[torch.Tensor, ...],
    thin: list[int],
    parameters: list[torch.Tensor],
) -> None:
    if not state.error_feedback:
        return
    pieces = torch.split(gradient, [parameter.numel() for parameter in parameters])
    for i in thin:
        state.errors.keep(pieces[i] - approximations[i], [parameters[i]])


def _first_factors(
    state: PowerSGD, parameters: list[torch.Tensor], matrices: list[torch.Tensor], index: int
) -> list[torch.Tensor]:
    """The factors of the previous step, or random numbers from one seed: the same on all ranks.

    A factor with NaN or Inf would never recover, so random numbers replace it too. The device decides that. To decide
    it here would make the host wait for the device once for each matrix.
    """
    shapes = [(matrix.shape[1], min(state.rank, *matrix.shape)) for matrix in matrices]
    kept = [
        state.factors.get(parameter, shape) if state.warm_start else None
        for parameter, shape in zip(parameters, shapes, strict=True)
    ]
    new = [i for i, each in enumerate(kept) if each is None]
    drawn = _draw(state.seed + 1_000_003 * state.step + 7_919 * index, [shapes[i] for i in new], matrices[:1])
    factors = dict(zip(new, drawn, strict=True))
    for i, each in enumerate(kept):
        if each is not None:
            matrix = matrices[i]
            spare = _spare(state.seed, shapes[i], matrix.device, matrix.dtype)
            factors[i] = torch.where(each.isfinite().all(), each.to(matrix.device, matrix.dtype), spare)
    return [factors[i] for i in range(len(matrices))]


@cache
def _spare(seed: int, shape: tuple[int, int], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A random factor in place of one that is not finite: always the same numbers, on all ranks."""
    (drawn,) = _draw(seed, [shape], [torch.empty(0, device=device, dtype=dtype)])
    return drawn


def _draw(seed: int, shapes: list[tuple[int, int]], like: list[torch.Tensor]) -> list[torch.Tensor]:
    """Draw factors on the host, the same for every kind of device, and send them in one copy."""
    if not shapes:
        return []
    source = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(shape, generator=source, dtype=like[0].dtype) for shape in shapes]
    return _split(to_device(_concatenate(drawn, drawn[0]), like[0].device), list(shapes))


def _concatenate(tensors: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else like.new_empty(0)


def _split(flat: torch.Tensor, shapes: list[torch.Size | tuple[int, int]]) -> list[torch.Tensor]:
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [piece.view(shape) for piece, shape in zip(torch.split(flat, sizes), shapes, strict=True)]
