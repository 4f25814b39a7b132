"""The command line: reads the options, checks them, and passes a `LaunchSpec` to the agent.

All code before the agent is light (no asyncio, no grpc, no third-party package). So an invalid command fails at once,
and a valid one starts its ranks earlier.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol

import _ddp_launch_entry as doors
from launcher import ending_file, ssh_control
from launcher.machine import devices
from launcher.settings import checks
from launcher.settings.arguments import CommandLine, UsageError, read_arguments
from launcher.settings.assemble import HostEnvironment, assemble, entry_point, run_id
from launcher.settings.checks import read_config
from launcher.settings.config import Settings, config_path, merge, unknown_variables
from launcher.settings.spec import LaunchSpec
from launcher.settings.values import printable
from launcher.ssh_control import SshControl
from rendezvous.values.contracts import INTERRUPTED
from rendezvous.values.error_codes import Code, with_code

# Only as the first word; a program of that name is ./doctor.
_DOCTOR, _DOCS, _WARM = "doctor", "docs", "warm"


class Command(Protocol):
    """The door `ddp_launch.command`: a command of a wing. It returns the text to print, which may have an `exit_code`,
    or raises `UsageError`.
    """

    def __call__(
        self, words: list[str], environ: Mapping[str, str], tell: Callable[[str], None], /
    ) -> str: ...


def main(argv: list[str] | None = None) -> int:
    try:
        words = sys.argv[1:] if argv is None else argv
        if words[:1] == [_DOCS]:
            return _show(_manual(tuple(words[1:])))
        if words[:1] == [_WARM]:
            return _run_warm(words[1:], os.environ)
        if command := _command_of_a_wing(words):
            said = command(words[1:], os.environ, partial(_print_message, words[0]))
            return _show(said) or getattr(said, "exit_code", 0)
        is_doctor = words[:1] == [_DOCTOR]
        line = read_arguments(words[1:] if is_doctor else words)
        if line.wants("help") or line.wants("version"):
            return _show(_help(line.words) if line.wants("help") else _version())
        if line.wants("print_completion"):
            shell = [line.options["print_completion"].text]
            return _show(
                doors.find(doors.COMMAND, "completion")(shell, os.environ, partial(_print_message, "note"))
            )
        _check_system()
        if is_doctor:
            return _run_doctor(line, os.environ)
        return _launch(line, os.environ, ssh_control.start_control(os.environ))
    except UsageError as error:
        ending_file.leave(error.exit_code, str(error), error.code)
        _print_message("error", with_code(str(error), error.code))
        return error.exit_code
    except doors.WingMissing as error:
        _print_message("error", with_code(str(error), Code.PACKAGE_MISSING))
        return UsageError.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


def _command_of_a_wing(words: list[str]) -> Command | None:
    """A command that another package brings does not hide a script."""
    name = words[0] if words else ""
    if name in doors.names(doors.COMMAND) or (name.replace("-", "").isalnum() and not os.path.exists(name)):
        command: Command | None = doors.find(doors.COMMAND, name)
        return command
    return None


def _check_system() -> None:
    if sys.platform != "linux":
        raise UsageError(
            f"ddp-launch runs on Linux only, and this system is {sys.platform}. Here you can use ddp-rendezvous, "
            "ddpctl, and torchrun with --rdzv-backend ddp.",
            code=Code.UNSUPPORTED_SYSTEM,
        )
    if "t" in sys.abiflags:
        raise UsageError(
            f"ddp-launch does not support free-threaded Python, and {sys.executable} is such a build. Use one with "
            "the global interpreter lock, for example python3.13 instead of python3.13t.",
            code=Code.UNSUPPORTED_SYSTEM,
        )


def _launch(line: CommandLine, environ: Mapping[str, str], control: SshControl | None) -> int:
    file = read_config(config_path(line, environ))
    settings = merge(line, environ, file)
    words = line.words or file.words
    if settings["print_config"]:
        from launcher.settings.usage import print_config_text

        return _show(print_config_text(settings, words, "command line" if line.words else file.name))
    # An agent that --hosts has started sees the option again if it came from a variable or a file.
    if not control and (settings["hosts"] or settings["hostfile"]):
        return _launch_over_ssh(settings, words, environ)
    spec, warnings = prepare(settings, words, environ)
    if control:
        spec = replace(spec, has_ssh_control=True, local_addr=spec.local_addr or control.address)
    for warning in (*unknown_variables(environ), *warnings):
        _print_message("warning", warning)
    if spec.nproc > 1 and not settings.of("nproc_per_node").given:
        how = "torchrun would start 1; --nproc-per-node sets the number"
        _print_message("note", f"{spec.nproc} ranks, one per GPU, or per CPU without GPUs ({how})")
    from launcher.start import run_agent

    return run_agent(spec)


def _run_doctor(line: CommandLine, environ: Mapping[str, str]) -> int:
    settings = merge(line, environ, read_config(config_path(line, environ)))
    checks.check_port_and_log_dir(settings)
    here = _host_environment(settings, environ.get("PYTHON_EXEC", "") or sys.executable, environ)
    from launcher.preflight import agent_preflight

    return agent_preflight.run(settings, line.words, environ, here)


def _run_warm(words: list[str], environ: Mapping[str, str]) -> int:
    from launcher.warm_pool import command

    if words[:1] in (["--help"], ["-h"]):
        return _show(_help(tuple(words[1:])))
    if not words or words[0] not in command.WORDS:
        said = f"unexpected {printable(words[0])}" if words else "a word is missing"
        raise UsageError(
            f"ddp-launch warm: {said}. Use ddp-launch warm start, stop or status.",
            code=Code.INVALID_COMMAND_LINE,
        )
    line = read_arguments(words[1:])
    if line.wants("help"):
        return _show(_help(line.words))
    _check_system()
    file = read_config(config_path(line, environ))
    settings = merge(line, environ, file)
    if words[0] != "start" and line.words:
        raise UsageError(
            f"unexpected argument {printable(line.words[0])}. Use ddp-launch warm {words[0]}.",
            code=Code.INVALID_COMMAND_LINE,
        )
    match words[0]:
        case "stop":
            return _show(command.stop(settings))
        case "status":
            text, code = command.status(settings)
            return _show(text) or code
    script = line.words or file.words
    return _show(command.start(settings, prepare(settings, script, environ)[0] if script else None))


def _launch_over_ssh(settings: Settings, words: tuple[str, ...], environ: Mapping[str, str]) -> int:
    """Start an agent on each host.

    The script must have the same path on each host; each host checks the other options.
    """
    fleet = doors.find(doors.FLEET, "ssh")
    for warning in (*unknown_variables(environ), *fleet.check(settings, environ)):
        _print_message("warning", warning)
    entry = entry_point(settings, words)
    folder = checks.check_folder()
    checks.check_entry(entry, environ.get("PYTHON_EXEC", ""), environ, _entry_flag(settings))
    name = run_id(settings, entry, 1, HostEnvironment(0, "", _stamp()))
    exit_code: int = fleet.run_fleet(settings, words, name, folder, environ)
    return exit_code


def prepare(
    settings: Settings, words: tuple[str, ...], environ: Mapping[str, str]
) -> tuple[LaunchSpec, list[str]]:
    """Return the checked spec, and a warning for each option that has no effect."""
    entry = entry_point(settings, words)
    checks.check_folder()
    python = environ.get("PYTHON_EXEC", "")
    checks.check_entry(entry, python, environ, _entry_flag(settings))
    spec, warnings = assemble(settings, entry, _host_environment(settings, python or sys.executable, environ))
    checks.check_port_and_log_dir(settings)
    checks.check_open_files(settings, spec)
    checks.check_debugger(settings, python, spec.nproc)
    checks.check_wings(settings)
    return spec, [*warnings, *filter(None, [checks.misplaced_option(entry)])]


def _entry_flag(settings: Settings) -> str:
    for dest in ("no_python", "module"):
        setting = settings.of(dest)
        if setting.value:
            return setting.origin.name if setting.origin.place == "flag" else setting.option.flag
    return ""


def _host_environment(settings: Settings, python: str, environ: Mapping[str, str]) -> HostEnvironment:
    nproc = settings.of("nproc_per_node")
    try:
        ranks = devices.count_ranks(nproc.value, environ, python=python)
    except devices.NoDevices as missing:
        raise nproc.wrong(
            str(missing),
            "check the devices and their driver, or set --nproc-per-node to a number of ranks or to cpu",
            code=Code.NO_DEVICES,
        ) from None
    return HostEnvironment(
        nproc=ranks, python=python, stamp=_stamp(), scheduler_job=_scheduler_job(environ), user=_user()
    )


def _scheduler_job(environ: Mapping[str, str]) -> str:
    """Return an ID that changes when Slurm requeues the job; with the old ID the service would reject the new run as
    ended.
    """
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")
    again = environ.get("SLURM_RESTART_COUNT", "")
    return ".".join(part for part in (job, step, f"r{again}" if again else "") if part) if job else ""


def _user() -> str:
    """The name of the user as the system knows it: the environment may differ between nodes."""
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container without an entry for this user
        return f"uid{os.getuid()}"


def _stamp() -> str:
    import time

    return f"{time.strftime('%m%d-%H%M%S')}-{os.urandom(2).hex()}"


def _help(words: tuple[str, ...]) -> str:
    """All options for `--help all`. A word that is left over, such as a script, gets the same help as no word."""
    from launcher.settings.usage import help_text, short_help_text

    try:
        width = os.get_terminal_size().columns
    except OSError:  # not a terminal
        width = 80
    show = help_text if words[:1] == ("all",) else short_help_text
    return show(max(72, min(width, 100)))


def _version() -> str:
    from launcher.preflight import installed

    return installed.version_text()


def _manual(words: tuple[str, ...]) -> str:
    from launcher import manual

    return _help(words[1:]) if words[:1] in (("--help",), ("-h",)) else manual.text(words)


def _show(text: str) -> int:
    try:
        print(text, flush=True)  # noqa: T201
    except UnicodeEncodeError:  # a value with characters that this terminal cannot show
        print(text.encode("ascii", "backslashreplace").decode(), flush=True)  # noqa: T201
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that the flush at exit cannot fail
        if not isinstance(error, BrokenPipeError):  # for a broken pipe, the reader has seen enough
            raise UsageError(
                f"cannot write to standard output ({error.strerror})", code=Code.CANNOT_WRITE_OUTPUT
            ) from None
    return 0


def _print_message(kind: str, message: str) -> None:
    if sys.stderr is not None:
        print(f"ddp-launch: {kind}: {message}", file=sys.stderr, flush=True)  # noqa: T201
