"""Watches the node's health and the ranks' phase times while ranks run, and reports them.

Changes of the node's health go to the terminal and to the service. Phase times go to the service once per window.
`--health-port` serves both over HTTP: /livez (the agent's loop answers, and no rank has stalled), /readyz (the ranks
run) and /metrics.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from launcher import daemon_threads
from launcher.exchange import Phase
from launcher.health import exposition, node_health, stall_detection
from launcher.health.exposition import PARTS, OverTime
from launcher.health.node_health import Health, NodeReading
from launcher.health.phase_times import phase_times
from launcher.health.rank_timers import RankTimers
from launcher.health.sampler import Node, Sampler
from launcher.settings.spec import timer_file
from launcher.sources.source import Poll, Source
from rendezvous.service.web import Web
from rendezvous.values.events import NodeHealth, PhaseTimesReported
from rendezvous.values.rank_view import BINS, Histogram
from rendezvous.values.types import StragglerPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from launcher.error_boundary import ErrorBoundary
    from launcher.exchange import RankEnded, Supervision
    from launcher.health.pages import Pages
    from launcher.health.rank_timers import Timer
    from launcher.health.watch import HangWatch
    from launcher.machine.gpu_state import Gpu
    from launcher.settings.spec import LaunchSpec
    from rendezvous.values.events import FromAgent
    from rendezvous.values.rank_time import RankTime

_SAMPLE_S = 5.0
_UNFIT_CHARS = 1000


class NodeWatch:
    def __init__(
        self,
        spec: LaunchSpec,
        folder: str,
        scratch: str,
        pages: Pages,
        hangs: HangWatch,
        say: Callable[[str], None],
        send: Callable[[FromAgent], None],
        boundary: ErrorBoundary,
    ) -> None:
        self._boundary = boundary
        self._spec, self._pages, self._hangs, self._say, self._send = spec, pages, hangs, say, send
        self._loop = asyncio.get_running_loop()
        self._health = Health()
        self._state: Callable[[], Supervision] | None = None
        self.on_news: Callable[[str], None] = lambda _text: None
        self.rank_times: Callable[[], Sequence[RankTime]] = tuple
        self._restarts = {part: Histogram((0,) * BINS) for part in ("all", *PARTS)}
        sources = [Source(place, spec.health_ignored) for place in spec.health_sources]
        self._poll = Poll(sources, os.environ)
        self._sampler = Sampler(partial(Node, [folder], self._poll), self._from_thread, _SAMPLE_S, boundary)
        self._web: Web | None = None
        self._scratch = scratch
        self._rank_timers: RankTimers | None = None
        self._expired: dict[int, str] = {}  # by rank: the message of its expired timer
        self._timer: asyncio.TimerHandle | None = None

    async def begin(self, state: Callable[[], Supervision]) -> None:
        """Start to watch: the agent has joined."""
        self._state = state
        self._poll.start()
        self._sampler.start()
        if self._spec.rank_timers:
            self._start_timers(timer_file(self._scratch, os.environ))
        if self._spec.health_address is not None:
            await self._serve(*self._spec.health_address)

    async def _serve(self, host: str, port: int) -> None:
        web = Web(self._is_ready, self._metrics, self._is_alive)
        try:
            port = await web.listen(host, port)
        except OSError as error:
            reason = error.strerror or str(error)
            return self._say_to_user(
                f"--health-port {host}:{port}: cannot listen: {reason}; the job continues without this port"
            )
        self._web = web
        self._say_to_user(f"node health: http://{host}:{port}/livez, /readyz and /metrics")

    async def end(self) -> None:
        self._sampler.close()
        self._poll.close()
        if self._rank_timers is not None:
            self._rank_timers.close()
        if self._timer is not None:
            self._timer.cancel()
        if self._web is not None:
            await self._web.close()

    def _say_to_user(self, text: str) -> None:
        self._say(f"ddp-launch: {text}")

    # --- the node ----------------------------------------------------------------------------------

    def _from_thread(self, reading: NodeReading) -> None:
        report = partial(
            self._boundary.called,
            "evaluating the health of the node",
            partial(self._on_reading, reading),
            None,
        )
        daemon_threads.call_in(self._loop, report)

    def _on_reading(self, reading: NodeReading) -> None:
        before = self._health
        self._health, news = node_health.evaluate(before, reading)
        self._sampler.pause_s = node_health.next_sample_s(self._health, _SAMPLE_S)
        for text in news:
            self._say_to_user(f"{self._state_now.agent.node}: {text}")
            self._send(self._told(text))
            self.on_news(text)
        if not news and self._health.texts != before.texts:  # an event is no longer in the list
            self._send(self._told(""))

    def _told(self, news: str) -> NodeHealth:
        unfit = self._health.unfit[:_UNFIT_CHARS]
        return NodeHealth(self._state_now.agent, news, self._health.texts, unfit)

    def with_node_problems(self, ended: RankEnded) -> RankEnded:
        """Add the problems of the node before the failure to the hint."""
        if ended.cause is None:
            return ended
        expired = self._expired.pop(ended.cause.rank, "")
        seen = node_health.before_end(self._health, self._loop.time())
        hint = "; ".join(filter(None, (expired or ended.cause.hint, seen)))
        return replace(ended, cause=replace(ended.cause, hint=hint))

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """As of the last reading."""
        return () if self._health.last is None else self._health.last.gpus

    # --- its ranks ---------------------------------------------------------------------------------

    def _start_timers(self, path: str) -> None:
        try:
            self._rank_timers = RankTimers(path, self._timer_expired, self._pages.pids)
        except OSError as error:
            self._say_to_user(
                f"--rank-timers: cannot create the pipe {path}: {error.strerror}; the job continues without rank timers"
            )

    def _timer_expired(self, timer: Timer) -> None:
        rank = next((view.rank for view in self._pages.views() if view.pid == timer.pid), None)
        if rank is not None and timer.signum:
            self._expired[rank] = timer.in_words
        self._say_to_user(f"{f'process {timer.pid}' if rank is None else f'rank {rank}'}: {timer.in_words}")

    def ranks_started(self, generation: int) -> None:
        self._expired.clear()
        if self._timer is not None:
            self._timer.cancel()
        if self._spec.job.stragglers.policy is not StragglerPolicy.OFF:
            self._report_phase_times(generation, begun=True)
        if texts := self._health.texts:  # the service discards the health of a node that leaves
            self._send(self._told("; ".join(texts)))

    def _report_phase_times(self, generation: int, *, begun: bool = False) -> None:
        if self._state_now.phase is Phase.DONE or (not begun and self._state_now.generation != generation):
            return
        if not begun:
            ranks = self._boundary.called(
                "reading the phase times of the ranks", lambda: phase_times(self._pages.views()), ()
            )
            self._send(PhaseTimesReported(self._state_now.agent, generation, ranks))
        window_s = self._spec.job.stragglers.window_s
        self._timer = self._loop.call_later(window_s, self._report_phase_times, generation)

    # --- HTTP ------------------------------------------------------------------------------

    @property
    def _state_now(self) -> Supervision:
        assert self._state is not None, "begin() must be called first"
        return self._state()

    def _is_ready(self) -> bool:
        return self._state_now.phase is Phase.RUNNING and bool(self._state_now.live)

    def _is_alive(self) -> bool:
        return self._state_now.phase is not Phase.RUNNING or not stall_detection.is_overdue(
            self._hangs.reports()
        )

    def _metrics(self) -> str:
        state = self._state_now
        restarts = state.assignment.restart_count if state.assignment is not None else 0
        names = (self._spec.job.job_id, state.agent.node)
        now = (max(0, state.generation), restarts, len(state.live), self._is_ready())
        running = exposition.Running(*now, *names)
        over_time = OverTime(self.rank_times(), self._restarts)
        return exposition.text(running, self._pages.views(), self._health, over_time)

    def restarted(self, parts_s: Mapping[str, float]) -> None:
        """The ranks of this node have finished their first step after a restart, which took so long part by part."""
        for part, seconds in (*parts_s.items(), ("all", sum(parts_s.values()))):
            self._restarts[part] = self._restarts[part].plus(seconds)
