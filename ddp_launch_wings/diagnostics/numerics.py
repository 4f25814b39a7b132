"""`ddp.check_numerics`: report non-finite gradients and diverging replicas in the step in which they occur.

    ddp.check_numerics(model)                                   # NaN and Inf, in every step that averages gradients
    ddp.check_numerics(model, replicas_every=100)               # and that all ranks have the same parameters
    ddp.check_numerics(model, scaler=scaler)                    # with a torch.amp.GradScaler

"Non-finite" means NaN or Inf. After averaging, a NaN of one rank is a NaN on all ranks, and its source is lost. So each
rank checks its own gradients before a bucket is sent. At the end of the backward the ranks exchange one number each. If
any rank found a non-finite gradient, all ranks raise `NumericsError` in the same step with the same text. It names the
ranks, and for each of them the parameter whose non-finite gradient was computed first. Replicas are compared by a hash
of each parameter's bytes.

On an accelerator the training thread must not wait for the result of a step: the device would idle meanwhile. There the
result is copied to the host behind the step, and read at the end of the next averaged step. This is still the same step
on all ranks, and the text names the step in which the gradients were computed. `at_once=True` waits instead.

A GradScaler makes gradients overflow on purpose while it searches for its scale, and skips such steps itself. With
`scaler=`, the check ignores non-finite gradients until the scale is down to 1. Then the scale is not the cause.

A check that is off costs nothing: the reducer calls it only while it is needed.
"""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from ddp.reducer.collectives import gather_rows
from ddp.reducer.device import HostCopy
from ddp.reducer.torch_reducer import reducer_of
from ddp.telemetry import capture, torch_api, torch_names
from ddp.telemetry.coded import CodedError, WrongValue, listed

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from ddp.reducer.reducer import Reducer

    Seen = Sequence[tuple[Sequence[int], torch.Tensor]]  # for each sent bucket, its members and their kinds


# Pure functions for the texts of numerics errors: non-finite gradients, and replicas that differ.

_MAX_RANKS = 8


@dataclass(frozen=True, slots=True)
class RankNumerics:
    """The non-finite gradients of one rank, before averaging."""

    rank: int
    first: int  # of the non-finite gradients, the parameter whose gradient arrived first
    is_nan: bool  # whether that gradient has a NaN; else it has an Inf
    count: int  # number of parameters with a non-finite gradient


def report_gradients(reports: Sequence[RankNumerics], names: Sequence[str], step: int) -> str:
    """`reports`: one for each rank with a non-finite gradient, ordered by rank; at least one."""
    shown = "; ".join(_describe(report, names) for report in reports[:_MAX_RANKS])
    more = f"; and {len(reports) - _MAX_RANKS} more ranks" if len(reports) > _MAX_RANKS else ""
    return f"non-finite gradients in {_step(step)}: {shown}{more}. {_advise(reports, names)}"


def _step(number: int) -> str:
    return f"step {number} (steps under no_sync() are not counted)"


def _describe(report: RankNumerics, names: Sequence[str]) -> str:
    what = "NaN" if report.is_nan else "Inf"
    others = report.count - 1
    more = (
        ""
        if not others
        else (f" (computed first; {others} of the other {len(names) - 1} gradients are non-finite too)")
    )
    return f"rank {report.rank} has {what} in the gradient of {names[report.first]}{more}"


def _advise(reports: Sequence[RankNumerics], names: Sequence[str]) -> str:
    if all(report.count == len(names) for report in reports):
        return "All gradients of these ranks are non-finite: check the loss and the input of this step on these ranks."
    return (
        "The gradients of all other ranks are finite: check the input of this step on the ranks named above."
    )


# --- replicas ------------------------------------------------------------------------------------------


def find_minority(values: Sequence[int]) -> tuple[tuple[int, ...], bool]:
    """Return the ranks whose value is not the most common one, and whether that value has a majority."""
    (common, times), *_ = Counter(values).most_common()
    minority = tuple(rank for rank, value in enumerate(values) if value != common)
    return minority, 2 * times > len(values)


def report_replicas(name: str, values: Sequence[int], others: int, step: int) -> str:
    """`values`: the hash of each rank's copy of the parameter; `others`: how many more parameters differ."""
    minority, has_majority = find_minority(values)
    more = f" (and {others} more parameter{'s' * (others != 1)})" if others else ""
    head = f"the replicas differ after {_step(step)}: parameter {name}{more}. "
    if has_majority:
        ranks = f"rank{'s' if len(minority) > 1 else ''} {listed(minority, _MAX_RANKS)}"
        found = f"Only {ranks} {'differ' if len(minority) > 1 else 'differs'} from the majority of the ranks."
    else:
        found = f"{_group_ranks(values)}. No value has a majority, so it is unknown which ranks are right."
    return (
        f"{head}{found} Check for code that changes parameters on some ranks only. Restore all ranks from the last "
        "checkpoint."
    )


def _group_ranks(values: Sequence[int]) -> str:
    by_value: dict[int, list[int]] = {}
    for rank, value in enumerate(values):
        by_value.setdefault(value, []).append(rank)
    shown = [listed(ranks, _MAX_RANKS) for ranks in list(by_value.values())[:_MAX_RANKS]]
    more = f"; {len(by_value) - _MAX_RANKS} more values" if len(by_value) > _MAX_RANKS else ""
    return "Ranks with equal values: " + "; ".join(shown) + more


_log = logging.getLogger("ddp")
VARIABLE = "DDP_CHECK_NUMERICS"
_PIECE = 1 << 18  # words that are hashed together: limits the memory that a comparison needs
_WORD = 8  # bytes
_MULTIPLIER = 0x9E3779B1
_NAN = 2


class NumericsError(CodedError, RuntimeError):
    """Raised by `backward()` on all ranks at the same step, with the same text."""

    code = "DDP-7005"


class Scaler(Protocol):
    """The methods of torch.amp.GradScaler that are used here."""

    def is_enabled(self) -> bool: ...
    def get_scale(self) -> float: ...
    def scale(self, outputs: torch.Tensor) -> torch.Tensor: ...


class NumericsCheck:
    """A check that runs until `end()`; also a context manager."""

    def __init__(
        self,
        model: DistributedDataParallel,
        reducer: Reducer,
        *,
        nan: bool,
        replicas_every: int,
        scaler: Scaler | None,
        at_once: bool,
    ) -> None:
        self.reducer = reducer
        self._module, self._ignored = model.module, model.parameters_to_ignore
        self._nan, self._every, self._scaler = nan, replicas_every, scaler
        self._at_once = at_once
        self._rounds = 0
        self._joining = False
        self._warned: set[str] = set()
        self._seen: list[tuple[Sequence[int], torch.Tensor]] = []
        self._results: list[Callable[[], None]] = []  # of the previous step: each reads one, and may raise

    def begin(self) -> None:
        self.reducer.before_launch.append(self._look)
        self.reducer.at_round_over.append(self._round_over)

    def end(self) -> None:
        """End the check on all ranks. On an accelerator it first reads the result of the last step, and may raise."""
        if self._stop():
            results, self._results = self._results, []
            for read in results:
                read()

    def _stop(self) -> bool:
        if self._look not in self.reducer.before_launch:
            return False
        self.reducer.before_launch.remove(self._look)
        self.reducer.at_round_over.remove(self._round_over)
        return True

    def __enter__(self) -> NumericsCheck:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.end()
        else:  # other ranks may be elsewhere, so nothing can be compared
            self._stop()

    # --- before a bucket is sent --------------------------------------------------------------------------

    def _look(self, number: int) -> None:
        sender = self.reducer.sender
        self._joining = sender.joins
        if self._nan:
            members = sender.plan.buckets[number].members
            self._seen.append((members, _nonfinite(sender.buckets[number])))

    # --- at the end of a step that was averaged ------------------------------------------------------

    def _round_over(self) -> None:
        seen, self._seen = self._seen, []
        joining, self._joining = self._joining, False
        if joining:
            return self._warn("inside join(), because ranks without input do not run them")
        if capture.is_capturing():
            return self._warn(
                "of a captured graph: a replay runs no checks. Check the steps before the capture"
            )
        self._rounds += 1
        results = self._start(seen)
        if not self._at_once:
            results, self._results = self._results, results
        for read in results:
            read()

    def _start(self, seen: Seen) -> list[Callable[[], None]]:
        """Start the comparisons of this step, and return the functions that read their results."""
        results = []
        if self._nan:
            results.append(self._compare_gradients(seen))
        if self._every and self._rounds % self._every == 0:
            results.append(self._compare_replicas())
        return results

    def _warn(self, which: str) -> None:
        if which not in self._warned:
            self._warned.add(which)
            _log.warning("ddp.check_numerics does not check steps %s", which)

    def _compare_gradients(self, seen: Seen) -> Callable[[], None]:
        sender = self.reducer.sender
        # A rank that sent nothing has found nothing, but it must take part in the collective.
        kinds = torch.cat(
            [kinds.to(sender.device, torch.int32) for _, kinds in seen]
            or [torch.zeros(1, dtype=torch.int32, device=sender.device)]
        )
        worst = kinds.max().reshape(1)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=sender.group)
        found, excuse, step = HostCopy(worst), self._excuse(), self._rounds

        def read() -> None:
            if found.read()[0]:
                self._raise_for(kinds, [member for members, _ in seen for member in members], excuse(), step)

        return read

    def _raise_for(self, kinds: torch.Tensor, order: list[int], excused: bool, step: int) -> None:
        """Exchange what each rank has found, and raise unless a rank has an excuse."""
        sender = self.reducer.sender
        mine = [-1, 0, 0, int(excused)]
        if places := kinds.nonzero().flatten().tolist():
            mine[:3] = [order[places[0]], int(kinds[places[0]] == _NAN), len(places)]
        rows = gather_rows(sender.group, torch.tensor(mine, dtype=torch.int64, device=sender.device))
        if any(row[3] for row in rows):
            return
        found = [
            RankNumerics(dist.get_global_rank(sender.group, i), row[0], bool(row[1]), row[2])
            for i, row in enumerate(rows)
            if row[0] >= 0
        ]
        raise self._error(report_gradients(found, self.reducer.names, step))

    def _excuse(self) -> Callable[[], bool]:
        """Whether the scaler is still searching for its scale, as it is now: the script updates it after the step."""
        scaler = self._scaler
        if scaler is None or not scaler.is_enabled():
            return bool
        if self._at_once:
            return lambda: scaler.get_scale() > 1.0
        scale = scaler.scale(torch.ones((), device=self.reducer.sender.device))
        return lambda: scale.item() > 1.0

    def _compare_replicas(self) -> Callable[[], None]:
        """Compare the parameters that this step started from: the optimizer has not run yet."""
        sender, step = self.reducer.sender, self._rounds
        named = [pair for pair in self._module.named_parameters() if pair[0] not in self._ignored]
        mine = torch.stack([fingerprint(parameter).to(sender.device) for _, parameter in named])
        extremes = torch.stack([mine, ~mine])  # the maximum of the complements gives the minimum
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=sender.group)
        unlike = HostCopy(extremes[0] != ~extremes[1])

        def read() -> None:
            differs = [i for i, is_unlike in enumerate(unlike.read()) if is_unlike]
            if not differs:
                return
            first = differs[0]
            values = [row[0] for row in gather_rows(sender.group, mine[first : first + 1])]
            text = report_replicas(named[first][0], values, len(differs) - 1, step)
            raise self._error(text)

        return read

    def _error(self, text: str) -> NumericsError:
        return NumericsError(f"ddp.check_numerics: {text}")


def _nonfinite(bucket: Any) -> torch.Tensor:
    """For each member, 0 if its gradient is finite, else its kind (NaN or Inf), without waiting for the device."""
    payload = bucket.payload
    if payload[0].is_sparse:
        pieces = [payload[0]._values()]
    elif len(payload) == len(bucket.parameters):
        pieces = list(payload)
    else:
        pieces = list(payload[0].split_with_sizes([parameter.numel() for parameter in bucket.parameters]))
    if payload[0].device.type != "cpu":
        some = [piece.reshape(-1) if piece.numel() else piece.new_zeros(1) for piece in pieces]
        largest = torch.stack(torch_api.get(torch_names.FOREACH_NORM)(some, float("inf")))
        return largest.isinf().to(torch.int32) + _NAN * largest.isnan().to(torch.int32)
    if len(payload) == 1 and not payload[0].is_sparse and not _kind(payload[0]):
        return torch.zeros(len(pieces), dtype=torch.int32)
    return torch.tensor([_kind(piece) for piece in pieces], dtype=torch.int32)


def _kind(tensor: torch.Tensor) -> int:
    """Return the code of NaN if any element is NaN, else that of Inf if any is Inf, else 0. Faster than a norm."""
    if not tensor.numel():
        return 0
    lowest, highest = torch.aminmax(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
    extremes = (lowest.item(), highest.item())
    if any(map(math.isnan, extremes)):
        return _NAN
    return int(any(map(math.isinf, extremes)))


def fingerprint(parameter: torch.Tensor) -> torch.Tensor:
    """A hash of all bits of a tensor and their positions, computed on its device."""
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
    """Return different odd numbers. A change of one word always changes the sum, and so does a swap of two words."""
    places = torch.arange(1, _PIECE + 1, dtype=torch.int64, device=device)
    return (places * _MULTIPLIER ^ (places << 17)) | 1


# --- starting a check -------------------------------------------------------------------------------------


def check_numerics(
    model: Any,
    *,
    nan: bool = True,
    replicas_every: int = 0,
    scaler: Scaler | None = None,
    at_once: bool | None = None,
) -> NumericsCheck:
    """Check every step with gradient averaging until `.end()`. Call it on all ranks with the same arguments.

    `replicas_every`: compare the replicas after this number of such steps; 0: never.
    `at_once`: raise in the same step (None: only on CPUs). On an accelerator the host then waits for it in each step.
    """
    reducer = reducer_of(model, "ddp.check_numerics")
    if replicas_every < 0:
        raise WrongValue(
            f"invalid replicas_every={replicas_every}: negative. Use 1 or more steps, or 0 for never"
        )
    at_once = reducer.sender.device.type == "cpu" if at_once is None else at_once
    check = NumericsCheck(
        model, reducer, nan=nan, replicas_every=replicas_every, scaler=scaler, at_once=at_once
    )
    check.begin()
    return check


def check_from_environment(model: DistributedDataParallel) -> None:
    """Start the check if DDP_CHECK_NUMERICS is set. 1 checks gradients; N > 1 also sets `replicas_every` to N."""
    text = os.environ[VARIABLE]
    if not text.isdecimal():
        raise WrongValue(
            f"invalid {VARIABLE}={text!r}: not a number. Use 1 to check for NaN and Inf, or N > 1 to also compare the "
            "replicas every N steps"
        )
    check_numerics(model, replicas_every=0 if text == "1" else int(text))
