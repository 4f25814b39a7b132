"""`ddp-launch --hosts a,b,c train.py`: one command starts the agent of every host, over ssh, and controls them.

The rendezvous runs in this process on loopback. Each host connects to it through its ssh connection, so the rendezvous
opens no network port, its traffic is encrypted, and it keeps running if a host fails. The output of the ranks arrives
with the prefixes of the agents and is merged line by line. A signal goes to all agents. If this process ends for any
reason, every agent sees the end of file on its standard input and stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddp_launch_wings.hosts import command_lines
from ddp_launch_wings.hosts.command_lines import SharedSettings, check
from launcher import error_boundary
from launcher.failure.ending import leave_error_file
from launcher.joining import addresses
from launcher.output import lines
from launcher.output.lines import is_colored
from launcher.output.terminal import Terminal
from launcher.settings.values import BadValue, Host, read_hostfile
from rendezvous.hosted import serve_privately
from rendezvous.signals import SignalWatch
from rendezvous.values.error_codes import Code, with_code

if TYPE_CHECKING:
    from launcher.settings.config import Setting, Settings


__all__ = ["check", "run_fleet"]
_LOOPBACK = "127.0.0.1"
_FORWARD_PORTS = range(20000, 32000)  # below the kernel's ephemeral range
_FORWARD_TRIES = 3
_READ = 1 << 16
_LONGEST_LINE = 1 << 20
_LAST_LINES = 5  # of a host that could not be started
_HURRIED_S = 2.0  # after a repeated signal: for the reader of the output to take the rest
_SSH_FAILED = 255


class HostAgent:
    """The agent of one host, and its state."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.own_address = ""  # of this machine; "": the host is another machine
        self.process: asyncio.subprocess.Process | None = None
        self.answered = False
        self.over = False
        self.ending: dict[str, str] = {}
        self.last_lines: list[str] = []
        self.exit_code = -1
        self.given_up = ""  # why this process no longer waits for the host

    def send(self, line: str) -> None:
        if self.process and self.process.stdin and not self.process.stdin.is_closing():
            with contextlib.suppress(OSError, RuntimeError):
                self.process.stdin.write(line.encode())


class Fleet:
    def __init__(
        self, settings: Settings, found: Sequence[Host], shared: SharedSettings, env: dict[str, str]
    ) -> None:
        self._settings = settings
        self._shared = shared
        self._env = env
        self._members = [HostAgent(host) for host in found]
        self._outward = ""  # this machine's address, as the other hosts see it
        self._asked_to_stop = asyncio.Event()
        self._outputs = Outputs()
        self._shown: dict[str, int] = {}
        self._stopping = 0
        self._stop_signal = 0  # from the user
        self._short_of_hosts = False
        self._job_is_over = False
        self._port = 0
        self._is_finishing = False

    async def run(self) -> int:
        signals = SignalWatch()
        for signum in _handled_signals(self._settings):
            signals.on(signum, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _handled_signals(self._settings))
        looking = asyncio.create_task(self._look_up())
        stop = asyncio.create_task(self._asked_to_stop.wait())
        await asyncio.wait((looking, stop), return_when=asyncio.FIRST_COMPLETED)
        for task in (looking, stop):
            task.cancel()
        stop_serving = await self._serve()
        async with asyncio.TaskGroup() as tasks:
            for rank, member in enumerate(self._members):
                tasks.create_task(self._run_member(member, rank))
        await stop_serving()
        exit_code = await self._finish()
        signals.close()  # another Ctrl-C has no effect
        return exit_code

    async def _look_up(self) -> None:
        """Look up names in threads, so that a slow resolver does not delay a signal."""
        named = [(member.host.bare, 22) for member in self._members]
        own = await asyncio.gather(*(asyncio.to_thread(addresses.own_address_of, *each) for each in named))
        for member, address in zip(self._members, own, strict=True):
            member.own_address = address
        elsewhere = [member.host.bare for member in self._members if not member.own_address]
        for host in elsewhere if any(own) else ():
            self._outward = self._outward or await asyncio.to_thread(addresses.source_address, host, 22)

    async def _serve(self) -> Callable[[], Any]:
        if self._shared.rendezvous:
            return _nothing
        private = await serve_privately(self._shared.run_id)
        self._port = private.port
        self._env["DDP_RENDEZVOUS_TOKEN"] = private.token
        return private.close

    # --- one host ----------------------------------------------------------------------------------

    async def _run_member(self, member: HostAgent, rank: int) -> None:
        tries = 1 if member.own_address or not self._port else _FORWARD_TRIES
        for _ in range(tries):
            if not self._stopping:
                await self._start(member, rank)
            taken = any("forwarding failed" in line for line in member.last_lines)
            if member.answered or self._stopping or not taken:
                break
        member.over = True
        if member.ending.get("whose") == "job" or (member.answered and member.exit_code == 0):
            self._job_is_over = True
            for each in self._members:
                self._give_up(each, "the job ended before this host connected")
        died = member.exit_code != 0 and not member.ending  # an agent that can, reports why it ends
        if died and not self._stopping:
            self._report_loss(member)

    async def _start(self, member: HostAgent, rank: int) -> None:
        command = self._command(member, rank)
        try:
            member.process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=self._environment(),
                start_new_session=True,  # this process forwards Ctrl-C
            )
        except OSError as error:
            member.last_lines, member.exit_code = [f"{command[0]}: {error.strerror}"], _SSH_FAILED
            return
        member.last_lines = []
        if self._stopping:  # meanwhile
            self._terminate(member)
        assert member.process.stdout
        assert member.process.stderr
        member.send(_json_line({"env": self._env, "address": self._address_of(member)}))
        patience_s = self._settings["join_timeout"]  # the other agents wait no longer for this one
        reason = f"its agent did not connect within {patience_s:g} s (--join-timeout): check ssh to this host"
        alarm = asyncio.get_running_loop().call_later(patience_s, self._give_up, member, reason)
        await asyncio.gather(
            self._relay(member, member.process.stdout, self._outputs.out),
            self._relay(member, member.process.stderr, self._outputs.err),
        )
        member.exit_code = await member.process.wait()
        alarm.cancel()

    def _give_up(self, member: HostAgent, why: str) -> None:
        """Stop a host that has not answered. ssh has its own connect timeout, but the remote command has none."""
        if not member.answered and not member.over and not self._stopping:
            member.given_up = why
            self._terminate(member)

    def _environment(self) -> dict[str, str]:
        """The environment of local processes. Settings of another rendezvous do not apply to the one served here."""
        drop = "DDP_RENDEZVOUS_" if self._port else "\0"
        return {name: value for name, value in os.environ.items() if not name.startswith(drop)}

    def _command(self, member: HostAgent, rank: int) -> list[str]:
        least, most = self._shared.nnodes
        node_rank = rank if least == most == len(self._members) else None
        port = self._port if member.own_address else random.choice(_FORWARD_PORTS)
        place = self._shared.rendezvous or f"{_LOOPBACK}:{port}"
        words = command_lines.argv_for(self._settings, self._shared, place, member.host, node_rank)
        command = command_lines.remote_command(self._shared.folder, words)
        if member.own_address:
            return ["/bin/sh", "-c", command]
        forward = ["-R", f"{_LOOPBACK}:{port}:{_LOOPBACK}:{self._port}"] if self._port else []
        return [*shlex.split(self._settings["ssh"]), *forward, member.host.name, command]

    def _address_of(self, member: HostAgent) -> str:
        """The address of this machine for other hosts; "" for those, which use the address of their ssh connection."""
        return (self._outward or member.own_address) if member.own_address else ""

    def _report_loss(self, member: HostAgent) -> None:
        """Report a lost host. If too few hosts remain, stop all agents, because no other host can join."""
        how = f"exit code {member.exit_code}"
        if member.given_up and not member.answered:
            how = member.given_up
        elif not member.answered:
            failed = (
                "the ssh connection"
                if member.exit_code == _SSH_FAILED
                else f"the start of {self._shared.program}"
            )
            how = f"{failed} failed: {'; '.join(member.last_lines) or how}"
        elif member.exit_code == _SSH_FAILED and not member.own_address:
            how = "the ssh connection was lost, and the ranks of this host stop; check the network to it and its sshd"
        else:
            how = f"its agent ended with {how}; see the messages of this host above"
        self._say(with_code(f"error: {member.host.name}: {how}", Code.HOST_FAILED))
        left = sum(not each.over for each in self._members)
        if left < self._shared.nnodes[0] and not self._job_is_over and (self._port or not member.answered):
            self._short_of_hosts = True
            self._stop_all(signal.SIGTERM)

    # --- signals -----------------------------------------------------------------------------------

    def _on_signal(self, number: int) -> None:
        signum = signal.Signals(number)
        if self._is_finishing:
            return self._outputs.abandon()
        if signum not in self._settings["signals_to_handle"]:
            self._send_all(signum)
            return
        if self._stopping == 0:
            self._stop_signal = signum
            self._asked_to_stop.set()
            self._say(
                f"{signum.name}: stopping the ranks on {len(self._members)} hosts "
                "(repeat the signal to kill them at once)"
            )
        self._stop_all(signum)

    def _stop_all(self, signum: signal.Signals) -> None:
        self._stopping += 1
        if self._stopping > 1:
            asyncio.get_running_loop().call_later(_HURRIED_S, self._outputs.abandon)
        self._send_all(signum)
        for member in self._members:
            if not member.answered or self._stopping > 2:
                self._terminate(member)

    def _terminate(self, member: HostAgent) -> None:
        # When it has been waited for, its number may be another process's.
        if member.process and member.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(member.process.pid, signal.SIGTERM)

    def _send_all(self, signum: signal.Signals) -> None:
        for member in self._members:
            member.send(f"{signum.name}\n")

    # --- what the user sees ---------------------------------------------------------------------------

    async def _relay(self, member: HostAgent, stream: asyncio.StreamReader, terminal: Terminal) -> None:
        shown: dict[str, int] = {}
        rest = b""
        while chunk := await stream.read(_READ):
            whole, newline, rest = (rest + chunk).rpartition(b"\n")
            if len(rest) > _LONGEST_LINE:
                whole, newline, rest = whole + newline + rest, b"\n", b""
            if newline:
                await self._show(member, whole + newline, terminal, shown)
        if rest:
            await self._show(member, rest + b"\n", terminal, shown)

    async def _show(self, member: HostAgent, text: bytes, terminal: Terminal, shown: dict[str, int]) -> None:
        lines = [line for line in text.splitlines(keepends=True) if self._is_for_user(member, line, shown)]
        await self._outputs.put(terminal, lines)

    def _is_for_user(self, member: HostAgent, line: bytes, shown: dict[str, int]) -> bool:
        frame = lines.parse(line)
        if frame is not None:
            member.answered = member.answered or frame.get("kind") == "hello"
            if frame.get("kind") == "ending":
                member.ending = {name: str(frame.get(name, "")) for name in ("whose", "text", "error")}
            return False
        if not member.answered:
            member.last_lines = [*member.last_lines, line.decode(errors="replace").strip()][-_LAST_LINES:]
            return False
        return self._is_new(line, shown)

    def _is_new(self, line: bytes, shown: dict[str, int]) -> bool:
        """Whether to show a line. The same message of several agents is shown once."""
        if not line.startswith(b"ddp-launch: "):
            return True
        text = line.decode(errors="replace")
        shown[text] = shown.get(text, 0) + 1
        if shown[text] <= self._shown.get(text, 0):
            return False
        self._shown[text] = shown[text]
        return True

    def _say(self, text: str) -> None:
        self._outputs.say(f"ddp-launch: {text}")

    async def _finish(self) -> int:
        """Show the end of the job from the report of an agent; without one, exit with the first error in host order."""
        self._is_finishing = True
        stopped = self._stop_signal and any(member.exit_code for member in self._members)
        first = "agent" if stopped else "job"
        reports = sorted(
            (each for each in self._members if each.ending), key=lambda each: each.ending["whose"] != first
        )
        if reports and not self._short_of_hosts:
            leave_error_file(reports[0].ending["error"], self._outputs.say)
            self._outputs.say(reports[0].ending["text"])
        await self._outputs.close()
        if stopped or self._short_of_hosts:
            return 128 + self._stop_signal if stopped else 1
        if reports and reports[0].ending["whose"] == "job":
            return reports[0].exit_code
        return next((member.exit_code for member in self._members if member.answered and member.exit_code), 0)


def run_fleet(
    settings: Settings, words: tuple[str, ...], run_id: str, folder: str, environ: Mapping[str, str]
) -> int:
    """Start the agent of every host and return the exit code of the job. Raises `UsageError` for invalid options."""
    found = settings["hosts"] or _read_hostfile(settings.of("hostfile"))
    if settings["hosts"] and settings["hostfile"]:
        raise settings.of("hostfile").wrong(
            f"contradicts {settings.of('hosts').quoted}",
            "use either --hosts or --hostfile",
            code=Code.CONTRADICTING_OPTIONS,
        )
    env = command_lines.sent_environment(environ, settings["send_env"] or ())
    if not settings["rendezvous"]:
        env = {name: value for name, value in env.items() if not name.startswith("DDP_RENDEZVOUS_")}
    shared = SharedSettings(
        program=_program(),
        folder=folder,
        run_id=run_id,
        nnodes=command_lines.world_of(settings, found),
        rendezvous=settings["rendezvous"] or "",
        color="always" if is_colored(settings["color"], os.isatty(2), environ) else "never",
        words=words,
    )

    # Until signals can be forwarded, none may end this process while hosts are starting.
    signal.pthread_sigmask(signal.SIG_BLOCK, _handled_signals(settings))

    async def main() -> int:
        return await Fleet(settings, found, shared, env).run()

    return error_boundary.run(main())


def _handled_signals(settings: Settings) -> set[signal.Signals]:
    signals = {signal.Signals(each) for each in settings["signals_to_handle"]}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signals.discard(signal.SIGHUP)  # nohup: its user wants the job to survive the terminal
    return {*signals, signal.SIGUSR1, signal.SIGUSR2}


def _read_hostfile(setting: Setting) -> tuple[Host, ...]:
    try:
        with open(setting.value, encoding="utf-8") as file:
            return read_hostfile(file.read())
    except BadValue as bad:
        raise setting.wrong(bad.problem) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a UTF-8 text file"
        raise setting.wrong(
            f"cannot read it ({reason})", "check the path and its permissions", code=Code.FILE_UNREADABLE
        ) from None


def _program() -> str:
    """The path of this command, which is the same on all hosts."""
    own = os.path.abspath(sys.argv[0])
    if os.path.basename(own) == "ddp-launch" and os.access(own, os.X_OK):
        return own
    return os.path.join(os.path.dirname(sys.executable), "ddp-launch")


def _json_line(content: dict[str, Any]) -> str:
    return json.dumps(content) + "\n"


async def _nothing() -> None:
    pass


# --- outputs ----------------------------------------------------------------------------------------
#
# The standard output and error of the `--hosts` command. Lines wait for their reader, and the agents wait too.

_TERMINAL_S = 5.0  # at the end, for a terminal that is slow to take the last lines


class Outputs:
    def __init__(self) -> None:
        self.out, self.err = Terminal(1), Terminal(2)
        self._has_room = {terminal: asyncio.Event() for terminal in (self.out, self.err)}

    async def put(self, terminal: Terminal, lines: Iterable[bytes]) -> None:
        """Show whole lines after all earlier ones are read."""
        await self._reader_of(terminal)
        terminal.put(b"".join(lines), "")
        self._flush(terminal)

    def say(self, text: str) -> None:
        self.err.say(text)
        self._flush(self.err)

    def abandon(self) -> None:
        """Drop what the readers have not taken."""
        for terminal, has_room in self._has_room.items():
            if not terminal.is_idle:
                terminal.give_up()
            has_room.set()

    async def close(self) -> None:
        """Wait until all is read, or `abandon`. A terminal has a limited time."""
        if lost := self.out.lost_lines(is_over=True):
            self.say(f"ddp-launch: standard output {lost}")
        for terminal in (self.out, self.err):
            self._flush(terminal)
            if not terminal.is_tty:
                await self._reader_of(terminal)
            terminal.close(time.monotonic() + _TERMINAL_S)

    async def _reader_of(self, terminal: Terminal) -> None:
        while not terminal.is_idle and not terminal.is_gone:
            await self._has_room[terminal].wait()

    def _flush(self, terminal: Terminal) -> None:
        terminal.flush()
        loop = asyncio.get_running_loop()
        if terminal.is_idle or terminal.is_gone:
            self._has_room[terminal].set()
            if terminal.fd >= 0:
                loop.remove_writer(terminal.fd)
        else:
            self._has_room[terminal].clear()
            loop.add_writer(terminal.fd, self._flush, terminal)
