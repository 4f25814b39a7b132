"""The pre-flight checks of an agent: they start with the agent, and end before it joins."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import _ddp_launch_entry as doors
from launcher.joining.connect import CannotConnect, open_session_of
from launcher.preflight import checkup, host
from launcher.preflight.checkup import Clock, Grade, skipped
from launcher.preflight.facts import gather
from launcher.stop_requests import unless_stopped
from rendezvous.values.contracts import CANNOT_RUN
from rendezvous.values.error_codes import Code
from rendezvous.values.late_dataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from launcher.error_boundary import ErrorBoundary
    from launcher.exchange import AgentEvent
    from launcher.joining.connect import ServiceConnection
    from launcher.preflight.checkup import Check, Comparison, Report
    from launcher.settings.spec import LaunchSpec
    from rendezvous.values.events import AgentJoined
    from rendezvous.values.types import NodeFacts

_SUFFIX = ".preflight"  # of the separate job of a comparison
_CLOCK_S = 3.0
_NOTE_CHARS = 2000


@dataclass(frozen=True, slots=True)
class HealthData:
    """The health data of the node that is sent with the join message."""

    healthy: bool
    note: str
    versions: str
    block: str = ""
    hardware: str = ""

    def of(self, facts: NodeFacts) -> NodeFacts:
        return replace(
            facts,
            healthy=self.healthy,
            health_note=self.note,
            versions=self.versions,
            block=self.block,
            hardware=self.hardware,
        )


class Preflight:
    """Must be created inside a running event loop. `say` receives lines for the user."""

    def __init__(self, spec: LaunchSpec, say: Callable[[str], None], boundary: ErrorBoundary) -> None:
        self._spec, self._say, self._boundary = spec, say, boundary
        self._gathering = asyncio.create_task(gather(spec, spec.preflight))

    async def checked(
        self, join: AgentJoined, connection: ServiceConnection, events: asyncio.Queue[AgentEvent]
    ) -> AgentJoined:
        """Add the results to the join message. A signal that stops the job cancels the checks.

        Raises `CannotConnect`.
        """
        concluding = self._boundary.awaited("the pre-flight check", self._concluded(connection), None)
        found = await unless_stopped(concluding, events)
        if isinstance(found, CannotConnect):
            raise found
        return replace(join, facts=found.of(join.facts)) if isinstance(found, HealthData) else join

    async def _concluded(self, connection: ServiceConnection) -> HealthData | CannotConnect:
        try:
            return await self.conclude(connection)
        except CannotConnect as failed:
            return failed

    async def conclude(self, connection: ServiceConnection) -> HealthData:
        """Raises `CannotConnect` if the machine fails the checks and the job has only this machine."""
        report, clock = await asyncio.gather(self._gathering, clock_checks(connection))
        report = report.plus(clock)
        if self._spec.preflight == "full" and self._spec.job.max_nodes > 1:
            report = report.plus(await self._compare_nodes(connection, report))
        for line in terminal_lines(report.checks):
            self._say(f"pre-flight: {line}")
        failed = checkup.failures(_conditions(report.checks, self._spec.preflight))
        if failed and self._spec.job.max_nodes == 1:
            named = f"this machine failed its pre-flight check: {failed}"
            raise CannotConnect(f"{named}. {_what_next(report)}", CANNOT_RUN, code=Code.PREFLIGHT_FAILED)
        had = str(report.versions)
        return HealthData(not failed, failed[:_NOTE_CHARS], had, report.block, report.hardware[:_NOTE_CHARS])

    async def _compare_nodes(self, connection: ServiceConnection, report: Report) -> tuple[Check, ...]:
        compare = doors.find(doors.NODE_COMPARISON, "links")
        spec = self._spec.named(self._spec.job.job_id + _SUFFIX)
        other = await open_session_of(connection, spec)
        try:
            compared: Comparison = await compare(
                other, spec, report, mtu_of(spec), lambda what: self._say(f"pre-flight: {what}")
            )
            return compared.checks
        finally:
            await other.leave()


def _conditions(checks: Sequence[Check], level: str) -> tuple[Check, ...]:
    """Return the checks that keep ranks off this node: those that the user has asked for.

    A check that runs by itself can be wrong about a machine on which the job would run, so it only reports.
    """
    if level in ("quick", "full"):
        return tuple(checks)
    return tuple(check for check in checks if check.name.startswith(checkup.NAME))


def _what_next(report: Report) -> str:
    failed = [check for check in report.checks if check.grade is Grade.FAIL]
    if all(check.name.startswith(checkup.NAME) for check in failed):
        return "Repair the node, leave a finding out with --health-ignore NAME, or remove --health-source"
    return "Run `ddp-launch doctor` to see all checks, or use --preflight off to skip them"


def mtu_of(spec: LaunchSpec) -> int:
    there = host.network(spec).interface
    return 0 if there is None else there.mtu


async def clock_checks(connection: ServiceConnection) -> tuple[Check, ...]:
    if not connection.endpoints:
        return ()
    from rendezvous.client.scratch_client import clock_offset

    try:
        found = await asyncio.wait_for(clock_offset(connection.endpoints[0], connection.options), _CLOCK_S)
    except TimeoutError:
        return (skipped("clock", f"not checked: the service did not answer within {_CLOCK_S:g} s"),)
    if found is None:
        return (skipped("clock", "not checked: the service does not report its time"),)
    return (checkup.judge_clock(Clock(*found)),)


def terminal_lines(checks: Sequence[Check]) -> list[str]:
    """Lines for the terminal: only warnings and failures."""
    return [
        f"{check.name}: {check.found}" + (f"; {check.advice}" if check.advice else "")
        for check in checks
        if check.grade in (Grade.WARN, Grade.FAIL)
    ]
