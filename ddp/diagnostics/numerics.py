"""`ddp.check_numerics`: gradients that are not finite, and replicas that drift apart, named when it happens.

    ddp.check_numerics(model)                                   # NaN and Inf, in every averaged step
    ddp.check_numerics(model, replicas_every=100)               # and whether all ranks still hold the same parameters
    ddp.check_numerics(model, scaler=scaler)                    # with a torch.amp.GradScaler

An average hides where a NaN came from: one rank's spoils all. So each rank looks at its own gradients when a bucket is
about to go, and at the end of the backward the ranks tell each other, one number each, whether they saw something. If
somebody did, all of them raise `NumericsError` at the same step with the same text: the ranks, and on each of them the
parameter whose gradient came first. Copies of the parameters are compared by a number made of each one's bytes.

A scaler makes gradients overflow on purpose while it looks for its scale, and skips such a step by itself. With
`scaler=`, what is not finite is left to it until its scale is down to 1: then it is not the scale.

Off, it costs nothing: it looks on as `ddp.trace` does, and the reducer talks to its buckets directly when nobody does.
"""

from __future__ import annotations

import logging
import math
import os
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from ddp.diagnostics import numerics_report
from ddp.diagnostics.bucket_observer import Onlooker
from ddp.diagnostics.numerics_report import Finding
from ddp.reducer.torch_reducer import reducer_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.nn.parallel import DistributedDataParallel

    from ddp.reducer.reducer import Reducer

_log = logging.getLogger("ddp")
VARIABLE = "DDP_CHECK_NUMERICS"
_PIECE = 1 << 18  # words that are looked at together: bounds what a comparison takes of memory
_WORD = 8  # bytes
_MULTIPLIER = 0x9E3779B1
_NAN = 2


class NumericsError(RuntimeError):
    """Raised by `backward()` on all ranks at the same step, with the same text."""


class Scaler(Protocol):
    """What is asked of a torch.amp.GradScaler."""

    def is_enabled(self) -> bool: ...
    def get_scale(self) -> float: ...


class NumericsCheck(Onlooker):
    """Looks on until `end()`; also a context."""

    def __init__(
        self,
        model: DistributedDataParallel,
        reducer: Reducer,
        *,
        nan: bool,
        replicas_every: int,
        scaler: Scaler | None,
    ) -> None:
        super().__init__(reducer)
        self._rounds_of = reducer.at_round_over
        self._module, self._ignored = model.module, model.parameters_to_ignore
        self._nan, self._every, self._scaler = nan, replicas_every, scaler
        self._rounds = 0
        self._joining = False
        self._told_of_join = False
        self._seen: list[tuple[Sequence[int], torch.Tensor]] = []

    def begin(self) -> None:
        super().begin()
        self._rounds_of.append(self._round_over)

    def end(self) -> None:
        if self._round_over in self._rounds_of:
            self._rounds_of.remove(self._round_over)
            super().end()

    def __enter__(self) -> NumericsCheck:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    # --- while buckets go --------------------------------------------------------------------------

    def launch(self, number: int) -> Any:
        sending = self.reducer.sending
        self._joining = sending.joins
        if self._nan:
            members = sending.plan.buckets[number].members
            self._seen.append((members, _unfinite(sending.buckets[number])))
        return super().launch(number)

    # --- at the end of a step that was averaged ------------------------------------------------------

    def _round_over(self) -> None:
        seen, self._seen = self._seen, []
        joining, self._joining = self._joining, False
        if joining:
            return self._stand_off()
        self._rounds += 1
        if self._nan:
            self._compare_gradients(seen)
        if self._every and self._rounds % self._every == 0:
            self._compare_replicas()

    def _stand_off(self) -> None:
        if not self._told_of_join:
            self._told_of_join = True
            _log.warning("numerics are not checked in a join: ranks without input have no step to look at")

    def _compare_gradients(self, seen: Sequence[tuple[Sequence[int], torch.Tensor]]) -> None:
        sending = self.reducer.sending
        # Where nothing was sent there is nothing to tell, but the others wait for a word.
        kinds = torch.cat([kinds for _, kinds in seen] or [torch.zeros(1, device=sending.device)]).to(
            torch.int32
        )
        worst = kinds.max().reshape(1)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=sending.group)
        if not worst.item():
            return
        mine = [-1, 0, 0, int(self._is_excused())]
        if places := kinds.nonzero().flatten().tolist():
            order = [member for members, _ in seen for member in members]
            mine[:3] = [order[places[0]], int(kinds[places[0]] == _NAN), len(places)]
        rows = _gathered(sending.group, torch.tensor(mine, dtype=torch.int64, device=sending.device))
        if any(row[3] for row in rows):
            return
        found = [
            Finding(dist.get_global_rank(sending.group, i), row[0], bool(row[1]), row[2])
            for i, row in enumerate(rows)
            if row[0] >= 0
        ]
        raise self._error(numerics_report.of_gradients(found, self.reducer.names, self._rounds))

    def _is_excused(self) -> bool:
        scaler = self._scaler
        return scaler is not None and scaler.is_enabled() and scaler.get_scale() > 1.0

    def _compare_replicas(self) -> None:
        """What is compared went into this step: the optimizer has not seen its gradients yet."""
        sending = self.reducer.sending
        named = [pair for pair in self._module.named_parameters() if pair[0] not in self._ignored]
        mine = torch.stack([fingerprint(parameter) for _, parameter in named]).to(sending.device)
        extremes = torch.stack([mine, ~mine])  # of the complements, the largest is that of the smallest
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=sending.group)
        differs = (extremes[0] != ~extremes[1]).nonzero().flatten().tolist()
        if not differs:
            return
        first = differs[0]
        rows = _gathered(sending.group, mine[first : first + 1])
        values = [row[0] for row in rows]
        text = numerics_report.of_replicas(named[first][0], values, len(differs) - 1, self._rounds)
        raise self._error(text)

    def _error(self, text: str) -> NumericsError:
        return NumericsError(f"ddp.check_numerics: {text}")


def _unfinite(bucket: Any) -> torch.Tensor:
    """Of each member whether its gradient is finite (0), or what it holds; nothing waits for a device here."""
    payload = bucket.payload
    if payload[0].is_sparse:
        pieces = [payload[0]._values()]
    elif len(payload) == len(bucket.parameters):
        pieces = list(payload)
    else:
        pieces = list(payload[0].split_with_sizes([parameter.numel() for parameter in bucket.parameters]))
    if payload[0].device.type != "cpu":
        some = [piece.reshape(-1) if piece.numel() else piece.new_zeros(1) for piece in pieces]
        largest = torch.stack(torch._foreach_norm(some, float("inf")))
        return largest.isinf().to(torch.int32) + _NAN * largest.isnan().to(torch.int32)
    if len(payload) == 1 and not payload[0].is_sparse and not _kind(payload[0]):
        return torch.zeros(len(pieces), dtype=torch.int32)
    return torch.tensor([_kind(piece) for piece in pieces], dtype=torch.int32)


def _kind(tensor: torch.Tensor) -> int:
    """One pass, in which a NaN wins over all else; on a CPU several times faster than a norm."""
    if not tensor.numel():
        return 0
    lowest, highest = torch.aminmax(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
    extremes = (lowest.item(), highest.item())
    if any(map(math.isnan, extremes)):
        return _NAN
    return int(any(map(math.isinf, extremes)))


def fingerprint(parameter: torch.Tensor) -> torch.Tensor:
    """A number made of all bits of a tensor and of their places, on its device."""
    flat = parameter.detach().reshape(-1).view(torch.uint8)
    whole = flat.numel() // _WORD * _WORD
    words = flat[:whole]
    if words.storage_offset() % _WORD:
        words = words.clone()
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    weights = _weights(flat.device)
    for piece in (*words.view(torch.int64).split_with_sizes(_sizes(whole // _WORD)), flat[whole:]):
        total = total * _MULTIPLIER + (piece * weights[: piece.numel()]).sum()
    return total


def _sizes(count: int) -> list[int]:
    return [min(_PIECE, count - start) for start in range(0, count, _PIECE)] or [0]


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """Odd, so that a difference in one word is one in the sum; and unlike those of its neighbours."""
    places = torch.arange(1, _PIECE + 1, dtype=torch.int64, device=device)
    return (places * _MULTIPLIER ^ (places << 17)) | 1


def _gathered(group: dist.ProcessGroup, mine: torch.Tensor) -> list[list[int]]:
    rows = [torch.zeros_like(mine) for _ in range(group.size())]
    dist.all_gather(rows, mine, group=group)
    return [row.tolist() for row in rows]


# --- asking for it ---------------------------------------------------------------------------------------


def check_numerics(
    model: Any, *, nan: bool = True, replicas_every: int = 0, scaler: Scaler | None = None
) -> NumericsCheck:
    """From now on, on all ranks alike, until `.end()`. `replicas_every` counts averaged steps; 0: never."""
    reducer = reducer_of(
        model, "ddp.check_numerics", "the numbers of a ddp.DistributedDataParallel can be checked"
    )
    if replicas_every < 0:
        raise ValueError(f"replicas_every={replicas_every}: give a number of steps, or 0 for never")
    check = NumericsCheck(model, reducer, nan=nan, replicas_every=replicas_every, scaler=scaler)
    check.begin()
    return check


def check_as_asked(model: DistributedDataParallel) -> None:
    """For a script that is not to be changed: DDP_CHECK_NUMERICS=1, or the number of steps from one comparison of
    the replicas to the next."""
    text = os.environ.get(VARIABLE, "")
    if text in ("", "0"):
        return
    if not text.isdecimal():
        raise ValueError(
            f"{VARIABLE}={text}: write 1 to look for NaN and Inf, or the number of steps between two "
            "comparisons of the replicas"
        )
    check_numerics(model, replicas_every=0 if text == "1" else int(text))
