"""The state of ranks as `ddpctl top` shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from launcher.health.page import in_words, times_of
from rendezvous.values.questions import GpuSeen, RankSeen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from launcher.machine.gpu_state import Gpu
    from rendezvous.values.questions import LoggedValue
    from rendezvous.values.rank_view import RankView


_AS_ON_THE_PAGE = (
    *("rank", "known", "phase", "phase_s", "quiet_s", "step", "step_s", "last_step_s", "mean_step_s"),
    "message",
)


def rank_seen(
    view: RankView,
    local_rank: int,
    *,
    pid: int,
    memory: int,
    gpu: GpuSeen | None,
    starts: int,
    logged: tuple[LoggedValue, ...] = (),
) -> RankSeen:
    times = times_of(view)
    same: dict[str, Any] = {name: getattr(view, name) for name in _AS_ON_THE_PAGE}
    return RankSeen(
        **same,
        local_rank=local_rank,
        pid=pid,
        alive=view.process.alive,
        process=view.process.state,
        spent_s=times.own_s + times.waiting_s,
        waited_s=times.waiting_s,
        memory=memory,
        gpu=gpu,
        starts=starts,
        doing=in_words(view),
        logged=logged,
    )


def gpu_of(local_rank: int, nproc: int, gpus: Sequence[Gpu]) -> GpuSeen | None:
    """The GPU of a rank. Known only where every rank has one of its own, in this order, as scripts choose them."""
    if len(gpus) < nproc or not 0 <= local_rank < len(gpus) or gpus[local_rank].lost:
        return None
    gpu = gpus[local_rank]
    return GpuSeen(gpu.index, gpu.memory_used, gpu.memory_total, gpu.utilization)
