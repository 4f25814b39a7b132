"""`ddp-launch doctor`: runs only the pre-flight checks and shows all results.

Exit codes: 0 if all checks passed, 1 with warnings, 2 if a check failed. For one node it needs no service and no
network. With `--nnodes N`, start it on each node with the options of a job: it waits for the other nodes, and then all
nodes measure their links.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import _ddp_launch_entry as doors
from launcher import daemon_threads
from launcher.joining.connect import CannotConnect, open_session
from launcher.output.lines import is_colored
from launcher.preflight import checkup
from launcher.preflight.agent_preflight import clock_checks, mtu_of
from launcher.preflight.checkup import exit_code
from launcher.preflight.facts import gather
from launcher.settings.arguments import UsageError
from launcher.settings.assemble import HostEnvironment, assemble
from launcher.settings.config import Settings, unknown_variables
from launcher.settings.spec import EntryKind, EntryPoint
from rendezvous.values.contracts import INVALID_USAGE
from rendezvous.values.error_codes import Code, with_code

if TYPE_CHECKING:
    from collections.abc import Mapping

    from launcher.preflight.checkup import Check, Report
    from launcher.settings.spec import LaunchSpec

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
