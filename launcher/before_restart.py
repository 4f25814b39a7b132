"""What a node does between two generations, before its ranks start again.

It waits until the GPU memory of the ranks that have ended is free. After a hang whose culprit is uncertain
(`Assignment.check_first`), it repeats its pre-flight check, with `--preflight full` also that of the links.
A node that fails a check that the user has asked for asks the service to be left out. Both are bounded: then the
ranks start anyway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from launcher.joining.connect import CannotConnect, ServiceConnection
from launcher.machine import gpu_reading
from launcher.machine.gpu_reading import memory_of
from launcher.machine.gpu_state import GpuMemory, MemoryWait, next_wait, still_held
from launcher.template.tree import process_stat

if TYPE_CHECKING:
    from launcher.error_boundary import ErrorBoundary
    from launcher.health.node_watch import NodeWatch
    from launcher.preflight.agent_preflight import Preflight
    from launcher.settings.spec import LaunchSpec
    from rendezvous.values.types import Assignment

_CHECKS_S = 30.0
_READ_S = 5.0  # a driver that hangs
_PAUSE_S = 0.1
_TO_MENTION_S = 1.0


class BeforeRestart:
    def __init__(
        self,
        spec: LaunchSpec,
        connection: ServiceConnection,
        node: NodeWatch,
        preflight: Callable[[LaunchSpec], Preflight | None],
        say: Callable[[str], None],
        boundary: ErrorBoundary,
    ) -> None:
        self._spec, self._connection, self._node, self._say = spec, connection, node, say
        self._preflight, self._boundary = preflight, boundary

    async def prepare(self, mine: Assignment, *, frees_memory: bool) -> None:
        """Return when the ranks of this assignment can start on this node."""
        steps: list[Awaitable[None]] = []
        if frees_memory:
            waiting = self._wait_for_memory()
            steps.append(self._boundary.awaited("waiting for free GPU memory", waiting, None))
        if mine.check_first:
            checking = self._check_again(mine)
            steps.append(self._boundary.awaited("checking this node again", checking, None))
        await asyncio.gather(*steps)

    # --- GPU memory ----------------------------------------------------------------------------------

    async def _wait_for_memory(self) -> None:
        loop, lowest = asyncio.get_running_loop(), self._node.lowest_gpu_memory
        began = loop.time()
        wait, held = MemoryWait(began, began), await _held(lowest)
        while held:
            last = held
            wait, is_over = next_wait(wait, sum(gpu.used for gpu in held), loop.time())
            if is_over:
                return self._say(
                    f"{_named(held)} still in use {loop.time() - began:.0f} s after the ranks have ended; starting the "
                    "next ones anyway. Look for other programs with nvidia-smi"
                )
            await asyncio.sleep(_PAUSE_S)
            held = await _held(lowest)
        if (took_s := loop.time() - began) >= _TO_MENTION_S:
            self._say(
                f"waited {took_s:.1f} s for the GPU memory of the ranks that have ended ({_named(last)} in use)"
            )
        return None

    # --- checks ----------------------------------------------------------------------------------------

    async def _check_again(self, mine: Assignment) -> None:
        job = replace(self._spec.job, min_nodes=mine.n_nodes, max_nodes=mine.n_nodes, spares=0)
        spec = replace(self._spec, job=job).named(f"{job.job_id}.{mine.generation}")
        preflight = self._preflight(spec)
        if preflight is None:
            return
        self._say(
            "it is uncertain which rank caused the hang: checking this node again before the ranks start"
        )
        try:
            found = await asyncio.wait_for(preflight.conclude(self._connection), _CHECKS_S)
        except TimeoutError:
            return self._say(f"the checks were not over after {_CHECKS_S:g} s; the ranks start without them")
        except CannotConnect as failed:
            return self._say(f"{failed}. The ranks start all the same, because the job has only this machine")
        if not found.healthy:
            self._node.ask_to_leave("checks after a hang", f"it failed its checks after a hang: {found.note}")
        return None


async def _held(lowest: dict[int, int]) -> tuple[GpuMemory, ...]:
    found = await asyncio.wait_for(asyncio.to_thread(_read, tuple(lowest)), _READ_S)
    return still_held(found, lowest, _lives)


def _read(indexes: Iterable[int]) -> tuple[GpuMemory, ...]:
    with gpu_reading.driver() as opened:
        return () if opened is None else tuple(memory_of(opened, index) for index in indexes)


def _lives(pid: int) -> bool:
    stat = process_stat(pid)
    return stat is not None and stat.state not in "ZX"


def _named(gpus: tuple[GpuMemory, ...]) -> str:
    return ", ".join(f"{gpu.used / (1 << 30):.1f} GiB of GPU {gpu.index}" for gpu in gpus)
