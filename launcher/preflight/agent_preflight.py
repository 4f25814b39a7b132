"""Runs the pre-flight checks: before a job, and as `ddp-launch doctor`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import _ddp_launch_entry as doors
from launcher import daemon_threads
from launcher.joining.connect import CannotConnect, open_session, open_session_of
from launcher.output.lines import is_colored
from launcher.preflight import checkup, facts
from launcher.preflight.checkup import Clock, Grade, exit_code, skipped
from launcher.preflight.facts import gather
from launcher.settings.arguments import UsageError
from launcher.settings.assemble import HostEnvironment, assemble
from launcher.settings.config import Settings, unknown_variables
from launcher.settings.spec import EntryKind, EntryPoint
from launcher.stop_requests import unless_stopped
from rendezvous.values.contracts import CANNOT_RUN, INVALID_USAGE
from rendezvous.values.error_codes import Code, with_code
from rendezvous.values.late_dataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from launcher.error_boundary import ErrorBoundary
    from launcher.exchange import AgentEvent
    from launcher.joining.connect import ServiceConnection
    from launcher.preflight.checkup import Check, Comparison, Report
    from launcher.settings.spec import LaunchSpec
    from rendezvous.values.events import AgentJoined
    from rendezvous.values.types import NodeFacts

# --- before a job ----------------------------------------------------------------------------------
#
# The pre-flight checks of an agent: they start with the agent, and end before it joins.

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
    there = facts.network(spec).interface
    return 0 if there is None else there.mtu


async def clock_checks(connection: ServiceConnection) -> tuple[Check, ...]:
    if not connection.endpoints:
        return ()
    from rendezvous.client.remote_session import clock_offset

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


# --- ddp-launch doctor -----------------------------------------------------------------------------
#
# `ddp-launch doctor`: runs only the pre-flight checks and shows all results.
#
# Exit codes: 0 if all checks passed, 1 with warnings, 2 if a check failed. For one node it needs no service and no
# network. With `--nnodes N`, start it on each node with the options of a job: it waits for the other nodes, and
# then all nodes measure their links.

_ENTRY = EntryPoint(EntryKind.PROGRAM, "doctor")
_TRIES = 20  # a service may remember this many earlier checks under the same name


def run(settings: Settings, words: tuple[str, ...], environ: Mapping[str, str], here: HostEnvironment) -> int:
    if words:
        raise UsageError(
            f"unexpected argument {words[0]!r}: doctor does not run a script. Use only options of ddp-launch.",
            code=Code.INVALID_COMMAND_LINE,
        )
    spec, warnings = assemble(settings, _ENTRY, here)
    if spec.preflight == "off":
        raise settings.of("preflight").wrong(
            "with this value, doctor has no checks to run", "use quick or full"
        )
    if not settings.of("preflight").given:
        spec = replace(spec, preflight="full")
    for warning in (*unknown_variables(environ), *warnings):
        _say(f"warning: {warning}")
    return daemon_threads.run(_check(spec, bool(settings["json"])))


async def _check(spec: LaunchSpec, as_json: bool) -> int:
    report = await gather(spec, spec.preflight)
    if spec.job.max_nodes > 1:
        try:
            report = await _with_others(spec, report)
        except CannotConnect as error:
            _say(with_code(f"error: {error}", error.code))
            return INVALID_USAGE
    _show(_as_json(report) if as_json else _as_table(report, spec.log.color))
    return exit_code(report.checks)


async def _with_others(spec: LaunchSpec, report: Report) -> Report:
    compare = doors.find(doors.NODE_COMPARISON, "links")
    began = time.monotonic()
    checks: tuple[Check, ...] = ()
    for number in range(1, _TRIES):
        named = spec if number == 1 else spec.named(f"{spec.job.job_id}.{number}")
        connection = await open_session(named, f"{os.getpid()}-{time.time_ns():x}")
        try:
            report = replace(report, node=connection.host)
            clock = await clock_checks(connection) if number == 1 else ()
            if spec.preflight != "full":
                return report.plus(clock)
            report = report.plus(clock)
            compared = await compare(connection, named, report, mtu_of(spec), _say)
            checks = compared.checks
        finally:
            await connection.leave()
        if not compared.too_late:
            break
    return replace(report.plus(checks), took_s=report.took_s + time.monotonic() - began)


def _as_table(report: Report, when: str) -> str:
    try:
        width = os.get_terminal_size(1).columns
    except OSError:
        width = 100
    colored = is_colored(when, os.isatty(1), os.environ)
    return checkup.table(report, width=max(60, min(width, 120)), color=colored)


def _as_json(report: Report) -> str:
    return json.dumps(checkup.as_json(report), indent=2, ensure_ascii=False)


def _show(text: str) -> None:
    _write(1, text)


def _say(text: str) -> None:
    _write(2, f"ddp-launch: doctor: {text}")


def _write(fd: int, text: str) -> None:
    encoding = getattr(sys.stdout if fd == 1 else sys.stderr, "encoding", None) or "utf-8"
    left = f"{text}\n".encode(encoding, "replace")
    with contextlib.suppress(OSError):  # the reader has closed the pipe; the exit code shows the result
        while left:
            left = left[os.write(fd, left) :]
