"""ddp-rendezvous: run the rendezvous service, and create its credentials."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import _ddp_launch_entry as doors
from rendezvous.coded_parser import CodedParser, add_completion
from rendezvous.grpc_io import choose_engine, silence_grpc
from rendezvous.signals import SignalWatch
from rendezvous.values.contracts import INVALID_USAGE, VERSION
from rendezvous.values.durations import seconds_in
from rendezvous.values.error_codes import Code, with_code

# What the service tells its surroundings: its state to systemd, and its log.

# --- systemd ---------------------------------------------------------------------------------------
#
# Report readiness, the watchdog's keep-alive and shutdown to systemd (sd_notify(3)).
#
# Without NOTIFY_SOCKET nothing is sent. The event loop itself sends the keep-alive: if the loop hangs, the keep-alive
# stops and systemd restarts the service.


class Notifier:
    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "").replace("@", "\0", 1)
        self._watchdog_s = _watchdog_s(environ)

    def send(self, words: str) -> None:
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
            try:
                sock.sendto(words.encode(), self._address)
            except OSError:
                pass  # the receiver is gone or does not read; this does not affect the service

    async def keep_alive(self) -> None:
        """Send the keep-alive twice per watchdog interval, until cancelled."""
        while self._address and self._watchdog_s:
            self.send("WATCHDOG=1")
            await asyncio.sleep(self._watchdog_s / 2)


def _watchdog_s(environ: Mapping[str, str]) -> float:
    """The watchdog interval; 0 if it is off, or if WATCHDOG_PID is another process."""
    text, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not text.isdigit() or (pid and pid != str(os.getpid())):
        return 0.0
    return int(text) / 1e6


# --- the log ---------------------------------------------------------------------------------------
#
# The log of the service: text or JSON lines, each with its job and generation if it concerns one.

_FIELDS = ("job", "generation", "kind")


class TextLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        fields = "".join(f" {name}={_one_line(value)}" for name, value in _extra_fields(record).items())
        text = f"{at} {record.levelname.lower()}{fields}: {_one_line(record.getMessage())}"
        return text + (f"\n{self.formatException(record.exc_info)}" if record.exc_info else "")


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {"at": round(record.created, 3), "level": record.levelname.lower(), **_extra_fields(record)}
        fields["text"] = record.getMessage()
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def _extra_fields(record: logging.LogRecord) -> dict[str, object]:
    return {name: getattr(record, name) for name in _FIELDS if hasattr(record, name)}


def _one_line(value: object) -> str:
    """Escape line breaks: names and reasons come from clients and must not look like another log line."""
    text = str(value)
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else "\\n" if c == "\n" else "?" for c in text)
    )


def start_logging(form: str, level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


_log = logging.getLogger("rendezvous")
_CANNOT = 1
_EXAMPLES = """\
examples:
  ddp-rendezvous serve
      a service for the jobs of this machine
  ddp-rendezvous key keys
  ddp-rendezvous serve --listen 0.0.0.0:29400 --token-keys keys \\
      --tls-cert service.pem --tls-key service.key --store file:/var/lib/ddp
      a service for a cluster; it keeps the jobs over a restart
  ddp-rendezvous token --token-keys keys --job 'team-a-*' --role agent
      a token with which nodes join the jobs of a team
"""


def main(argv: Sequence[str] | None = None) -> int:
    from rendezvous.service import settings

    parser = command_line()
    arguments = parser.parse_args(argv)
    try:
        match arguments.command:
            case "serve":
                settled = settings.settle(arguments, os.environ)
                choose_engine()
                return asyncio.run(serve(settled))
            case "secret":
                return _print_secret(arguments.file)
            case "token":
                return _print_token(arguments)
            case "key":
                return _add_key(arguments.file)
            case "completion":
                made = doors.find(doors.COMPLETION, "argparse")(parser, arguments.shell)
                sys.stdout.write(f"{made}\n")
                return 0
            case command:
                return int(doors.find(doors.SERVICE_COMMAND, command).carry_out(arguments))
    except (
        ValueError,
        OSError,
        doors.WingMissing,
    ) as error:  # with a message for the user
        _print_error(error)
        return INVALID_USAGE


def command_line() -> argparse.ArgumentParser:
    from rendezvous.service import settings

    parser = CodedParser(
        "ddp-rendezvous",
        description="Runs the rendezvous service, and creates its credentials.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ddp-rendezvous {VERSION}")
    commands = parser.add_subparsers(
        dest="command",
        required=True,
        metavar="COMMAND",
        title="commands (COMMAND --help has the options of one)",
    )
    settings.add_arguments(commands.add_parser("serve", help="run the service until SIGTERM"))
    _add_token(commands.add_parser("token", help="print a new access token"))
    key = commands.add_parser(
        "key", help="add a new key to a key file (created if missing); new tokens are signed with it"
    )
    key.add_argument("file", help="the key file to create or extend")
    secret = commands.add_parser(
        "secret",
        help="create the shared secret of a job whose agents run the rendezvous; without FILE, print it",
    )
    secret.add_argument("file", nargs="?", default="", help="a new file to write the secret to")
    for name in doors.names(doors.SERVICE_COMMAND):
        _add_wing(commands, name)
    add_completion(commands)
    return parser


def _add_wing(commands: Any, name: str) -> None:
    """If the wing is missing, its command says so."""
    try:
        wing = doors.find(doors.SERVICE_COMMAND, name)
    except doors.WingMissing:
        missing = commands.add_parser(name, help="not installed", add_help=False, prefix_chars="\0")
        missing.add_argument("words", nargs="*")
    else:
        wing.add(commands.add_parser(name, help=wing.HELP))


def _print_error(error: Exception) -> None:
    code = getattr(error, "code", Code.SERVICE_SETTING_INVALID)
    sys.stderr.write(f"ddp-rendezvous: {with_code(str(error), code)}\n")


_KEYS_STAY = "warning: the key file cannot be used, so keys that were removed from it are still valid\n"


# --- serve ---------------------------------------------------------------------------------------------


async def serve(settled: Mapping[str, Any]) -> int:
    stop: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def note(signum: int) -> None:
        if not stop.done():
            stop.set_result(signum)

    with contextlib.closing(SignalWatch()) as signals:
        for signum in (signal.SIGTERM, signal.SIGINT):
            signals.on(signum, note)
        return await _serve(settled, stop)


async def _serve(settled: Mapping[str, Any], stop: asyncio.Future[int]) -> int:
    silence_grpc()
    from rendezvous.service import settings
    from rendezvous.service.server import CannotListen, Server, raise_file_limit
    from rendezvous.store.open import BadUrl, open_store
    from rendezvous.store.protocol import StoreError

    if problem := _page_problem(settled):
        _print_error(problem)
        return INVALID_USAGE
    start_logging(settled["log_format"], settled["log_level"])
    raise_file_limit()
    for warning in settings.warnings(settled):
        _log.warning(warning)
    try:
        store = await open_store(settled["store"])
    except StoreError as error:
        _print_error(error)
        return INVALID_USAGE if isinstance(error, BadUrl) else _CANNOT
    server = Server(store, _server_options(settled))
    try:
        await server.start()
        await _run(server, settled, stop)
    except (CannotListen, OSError) as error:
        _print_error(error)
        return _CANNOT
    finally:
        await server.close()
        await store.close()
    return 0


async def _run(server: Any, settled: Mapping[str, Any], stop: asyncio.Future[int]) -> None:
    from rendezvous.service.server import CannotListen, in_words
    from rendezvous.service.web import Web

    web = Web(
        lambda: server.health.serving,
        server.metrics.text,
        refused=server.refusals.note,
        warning=lambda: _KEYS_STAY if server.gate.problem else "",
    )
    page = _page_of(server, settled)
    for option, listen in (("http", web.listen), ("web", None if page is None else page.start)):
        if not settled[option] or listen is None:
            continue
        host, _, port = settled[option].rpartition(":")
        try:
            listening = await listen(host.strip("[]"), int(port))
        except OSError as error:
            raise CannotListen(
                f"cannot listen on {settled[option]} (--{option}): {in_words(error)}. Use another port or address"
            ) from error
        _log.info(*(("metrics at %s:%d", host, listening) if option == "http" else ("page at %s", listening)))
    where = ", ".join(
        a if a.startswith("unix:") else f"{a.rpartition(':')[0]}:{p}"
        for a, p in zip(settled["listen"], server.ports, strict=True)
    )
    is_lost = "in memory, and lost when this process ends (--store keeps it)"
    kept = is_lost if settled["store"] == "memory" else "in the store"
    _log.info("serving at %s; the state of jobs is kept %s", where, kept)
    notifier = Notifier()
    notifier.send(f"READY=1\nSTATUS=serving at {where}")
    keep_alive = asyncio.create_task(notifier.keep_alive())
    signum = await stop
    keep_alive.cancel()
    notifier.send("STOPPING=1")
    _log.info("received %s: asking the agents to reconnect, and shutting down", signal.Signals(signum).name)
    await web.close()
    if page is not None:
        await page.close()


def _page_of(server: Any, settled: Mapping[str, Any]) -> Any:
    if not settled["web"]:
        return None
    return doors.find(doors.PAGE, "web").of_service(server, _certificates(settled))


def _page_problem(settled: Mapping[str, Any]) -> Exception | None:
    if not settled["web"]:
        return None
    try:
        missing = doors.find(doors.PAGE, "web").missing_packages()
    except doors.WingMissing as error:
        return error
    return ValueError(missing) if missing else None


def _certificates(settled: Mapping[str, Any]) -> Any:
    from rendezvous.access.auth import Certificates

    if not settled["tls_cert"]:
        return None
    return Certificates(settled["tls_cert"], settled["tls_key"], settled["client_ca"])


def _server_options(settled: Mapping[str, Any]) -> Any:
    from rendezvous.service import settings
    from rendezvous.service.agent_stream import ServiceLimits
    from rendezvous.service.server import ServerOptions

    return ServerOptions(
        listen=tuple(settled["listen"]),
        advertise=settled["advertise"],
        key_file=settled["token_keys"],
        certificates=_certificates(settled),
        certificate_files=settings.certificate_files(settled),
        history_s=settled["history"] * 86_400.0,
        history_jobs=int(settled["history_jobs"]),
        resume_grace_s=settled["resume_grace"],
        reflection=settled["reflection"],
        limits=ServiceLimits(jobs=int(settled["max_jobs"]), agents=int(settled["max_agents"])),
        journals=_journals(
            settled["journal_dir"], int(settled["journal_limit"]), int(settled["journal_space"])
        ),
    )


def _journals(folder: str, limit_mib: int, space_mib: int) -> Any:
    from rendezvous.replay.journal import Journals
    from rendezvous.service.settings import SettingsUnusable

    if not folder:
        return None
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
    except OSError as error:
        raise SettingsUnusable(
            f"--journal-dir {folder}: cannot create the folder: {error.strerror}. Use another folder",
            code=Code.FOLDER_UNUSABLE,
        ) from None
    return Journals(os.path.abspath(folder), limit_mib << 20, _log.warning, space_mib << 20)


# --- token, key ----------------------------------------------------------------------------------------


def _add_token(parser: argparse.ArgumentParser) -> None:
    from rendezvous.access.auth import Role

    parser.add_argument(
        "--token-keys",
        default=os.environ.get("DDP_RENDEZVOUS_TOKEN_KEYS"),
        metavar="FILE",
        help="the key file of the service",
    )
    parser.add_argument(
        "--job",
        required=True,
        metavar="PATTERN",
        help="the job that it is valid for: an id or a pattern such as 'team-a-*' or '*'",
    )
    parser.add_argument(
        "--role",
        required=True,
        choices=[role.value for role in Role],
        help="agent: join jobs as a node; operator: read and control jobs; viewer: read jobs",
    )
    parser.add_argument(
        "--ttl", default="24h", metavar="TIME", help="how long it is valid: 30m, 24h, 7d (default: 24h)"
    )


def _print_token(arguments: argparse.Namespace) -> int:
    from rendezvous.access.auth import Grant, Role, new_grant_id, read_keys, sign

    if not arguments.token_keys:
        raise ValueError(
            "--token-keys is missing: set it to the key file; `ddp-rendezvous key FILE` creates one"
        )
    if not arguments.job:
        raise ValueError("--job is empty: give a job id, or '*' for all jobs")
    until = time.time() + seconds(arguments.ttl)
    grant = Grant(new_grant_id(), arguments.job, Role(arguments.role), int(until))
    sys.stdout.write(sign(grant, read_keys(arguments.token_keys)[-1]) + "\n")
    return 0


def seconds(text: str) -> float:
    found = seconds_in(text) if text[-1:].isalpha() else None  # a number alone could be meant as hours
    if found is None or found < 0:
        raise ValueError(f"invalid --ttl {text!r}: use for example 90s, 30m, 24h or 7d.")
    return found


def _print_secret(path: str) -> int:
    from rendezvous.access import secret

    if path:
        secret.write_new(path)
        sys.stdout.write(
            f"created {path}. Keep it private: anyone who can read it can join the job as a node.\n"
        )
    else:
        sys.stdout.write(secret.make())
    return 0


def _add_key(path: str) -> int:
    from rendezvous.access.auth import add_key

    try:
        key_id = add_key(path)
    except OSError as error:
        raise ValueError(
            f"cannot write the key file {path}: {error.strerror}. Check its directory and permissions"
        ) from error
    sys.stdout.write(
        f"added key {key_id} to {path}. New tokens are signed with it; tokens of older keys remain valid.\n"
    )
    if mode := os.stat(path).st_mode & 0o077:
        sys.stderr.write(
            f"ddp-rendezvous: other users can open {path} (mode {0o600 | mode:04o}), and then create tokens. "
            f"Run: chmod 600 {path}\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
