"""The settings of `ddp-rendezvous serve`: options override the environment, the configuration file and the defaults."""

from __future__ import annotations

import argparse
import math
import re
import tomllib
from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

from rendezvous.client.credential_files import is_loopback
from rendezvous.values.contracts import PORT
from rendezvous.values.error_codes import Code, Coded
from rendezvous.values.late_dataclass import dataclass

ENV = "DDP_RENDEZVOUS_"


class SettingsUnusable(Coded, ValueError):
    """A setting is invalid. The message is for the user who starts the service."""

    code = Code.SERVICE_SETTING_INVALID


_ADDRESS = "HOST:PORT"


@dataclass(frozen=True, slots=True)
class ServiceSetting:
    name: str
    kind: str  # text, list, flag, number, count
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    metavar: str = ""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def _text(
    name: str, words: str, metavar: str = "", default: str = "", choices: tuple[str, ...] = ()
) -> ServiceSetting:
    return ServiceSetting(name, "text", default, words, choices, metavar)


def _flag(name: str, words: str) -> ServiceSetting:
    return ServiceSetting(name, "flag", False, words)


def _number(name: str, default: float, words: str, metavar: str, kind: str = "number") -> ServiceSetting:
    return ServiceSetting(name, kind, default, words, metavar=metavar)


_count = partial(_number, kind="count")

SETTINGS = (
    ServiceSetting(
        "listen",
        "list",
        (f"127.0.0.1:{PORT}",),
        "address to serve on; repeat the option for more addresses",
        metavar=_ADDRESS,
    ),
    _text("advertise", "address at which agents reach this replica (default: the first --listen)", _ADDRESS),
    _text(
        "store",
        "where to keep jobs: memory, file:PATH, or etcd://HOST:PORT,.../PREFIX",
        "URL",
        default="memory",
    ),
    _text("http", "address for /livez, /readyz and /metrics (default: none)", _ADDRESS),
    _text(
        "web", "address for the page that shows and controls the jobs in a browser (default: none)", _ADDRESS
    ),
    _text("token_keys", "key file that verifies tokens; without it, clients need no token", "FILE"),
    _text("tls_cert", "certificate of the service (PEM); read again when it changes", "FILE"),
    _text("tls_key", "private key of the certificate (PEM)", "FILE"),
    _text("client_ca", "require a client certificate signed by this CA (PEM)", "FILE"),
    _flag("insecure", "permit other machines to connect without TLS or without authentication"),
    _number("history", 14.0, "number of days to keep finished jobs", "DAYS"),
    _count("history_jobs", 1000, "most finished jobs to keep: with more, the oldest ones are deleted", "N"),
    _text("journal_dir", "folder for a journal of each job, for `ddpctl replay` (default: none)", "DIR"),
    _count(
        "journal_limit", 8, "size in MiB at which a journal begins a new file; the file before is kept", "MIB"
    ),
    _count(
        "journal_space",
        1024,
        "size in MiB of all journals together: those that were not written for the longest time are removed",
        "MIB",
    ),
    _number(
        "resume_grace",
        1.0,
        "seconds to wait for an agent to reconnect before it counts as lost, if its ranks do not run any more",
        "SECONDS",
    ),
    _count("max_jobs", 1000, "maximum number of unfinished jobs", "N"),
    _count("max_agents", 65_536, "maximum number of agents of all jobs together", "N"),
    _text("log_format", "format of log lines: text or json", default="text", choices=("text", "json")),
    _text(
        "log_level",
        "lowest level to log: debug, info, warning or error",
        default="info",
        choices=("debug", "info", "warning", "error"),
    ),
    _flag("reflection", "serve the schema to tools such as grpcurl (grpc.reflection.v1)"),
)
_BY_NAME = {setting.name: setting for setting in SETTINGS}
_TRUE, _FALSE = ("1", "true", "yes"), ("", "0", "false", "no")
_EXPECTED = {
    "text": "a string",
    "list": "a string or a list of strings",
    "flag": "true or false",
    "number": "a number",
    "count": "a whole number",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        default=None,
        metavar="FILE",
        help='TOML file with these settings, such as listen = ["127.0.0.1:29400"]',
    )
    for setting in SETTINGS:
        default = _default_text(setting)
        words = f"{setting.help}{default} [{variable(setting)}]".replace("%", "%%")
        match setting.kind:
            case "flag":
                parser.add_argument(setting.flag, action="store_true", default=None, help=words)
            case "list":
                parser.add_argument(setting.flag, action="append", metavar=setting.metavar, help=words)
            case "number" | "count":
                parser.add_argument(setting.flag, type=float, metavar=setting.metavar, help=words)
            case _:
                parser.add_argument(
                    setting.flag, choices=setting.choices or None, metavar=setting.metavar or None, help=words
                )


def _default_text(setting: ServiceSetting) -> str:
    match setting.default:
        case "" | False:
            return ""
        case tuple() as several:
            return f" (default: {', '.join(several)})"
        case float() as number:
            return f" (default: {number:g})"
        case value:
            return f" (default: {value})"


def settle(arguments: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, Any]:
    """Merge all sources and check the result. Raises `SettingsUnusable`."""
    config = arguments.config or environ.get(f"{ENV}CONFIG", "")
    settled = {setting.name: setting.default for setting in SETTINGS}
    if config:
        settled |= _from_file(config)
    settled |= {
        s.name: _from_text(s, environ[variable(s)], variable(s)) for s in SETTINGS if variable(s) in environ
    }
    given = {s.name: getattr(arguments, s.name) for s in SETTINGS}
    if re.match(r"etcd://[^/@]*:[^/]*@", given["store"] or ""):
        raise SettingsUnusable(
            "--store contains a password, and every user of this machine can read it in the process list. "
            "Write USER@, and pass the password with ?password-file=FILE or DDP_RENDEZVOUS_ETCD_PASSWORD"
        )
    settled |= {name: value for name, value in given.items() if value is not None}
    _check(settled)
    return settled


def variable(setting: ServiceSetting) -> str:
    """The environment variable that sets it."""
    return ENV + setting.name.upper()


def _from_file(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            found = tomllib.load(file)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise SettingsUnusable(
            f"cannot read the configuration file {path} (--config): {error}", code=Code.FILE_UNREADABLE
        ) from error
    return {name.replace("-", "_"): _from_toml(path, name.replace("-", "_"), found[name]) for name in found}


def _from_toml(path: str, name: str, value: Any) -> Any:
    setting = _BY_NAME.get(name)
    if setting is None:
        raise SettingsUnusable(f"{path}: unknown setting {name}. Known settings: {', '.join(_BY_NAME)}.")
    match setting.kind, value:
        case ("flag", bool()) | ("text", str()):
            return value
        case ("number" | "count", int() | float()) if not isinstance(value, bool):
            return value
        case ("list", list()) if all(isinstance(item, str) for item in value):
            return value
        case ("list", str()):
            return [value]
    raise SettingsUnusable(f"{path}: invalid {name} {value!r}: expected {_EXPECTED[setting.kind]}")


def _from_text(setting: ServiceSetting, text: str, where: str) -> Any:
    match setting.kind:
        case "list":
            return [item.strip() for item in text.split(",") if item.strip()]
        case "flag" if text.lower() in (*_TRUE, *_FALSE):
            return text.lower() in _TRUE
        case "number" | "count":
            try:
                return float(text)
            except ValueError:
                raise SettingsUnusable(f"invalid {where} {text!r}: expected a number") from None
        case "text":
            return text
    raise SettingsUnusable(f"invalid {where} {text!r}: expected true or false")


def _check(settled: Mapping[str, Any]) -> None:
    for setting in SETTINGS:
        if setting.choices and settled[setting.name] not in setting.choices:
            raise SettingsUnusable(
                f"invalid {setting.flag} {settled[setting.name]!r}: use one of {', '.join(setting.choices)}"
            )
        if setting.kind in ("number", "count"):
            _check_number(setting, settled[setting.name])
    for address in (
        *settled["listen"],
        *filter(None, (settled["http"], settled["web"], settled["advertise"])),
    ):
        check_address(address)
    for name, port in (("http", PORT + 10), ("web", PORT + 80)):  # for probes and browsers, which use TCP
        if settled[name].startswith("unix:"):
            raise SettingsUnusable(
                f"invalid --{name} {settled[name]!r}: a Unix socket is possible only for --listen. "
                f"Use HOST:PORT, for example 127.0.0.1:{port}"
            )
    if not settled["listen"]:
        raise SettingsUnusable("--listen is empty: give at least one HOST:PORT")
    if bool(settled["tls_cert"]) != bool(settled["tls_key"]):
        raise SettingsUnusable("--tls-cert and --tls-key must be set together: set both or neither")
    if settled["client_ca"] and not settled["tls_cert"]:
        raise SettingsUnusable("--client-ca needs TLS: also set --tls-cert and --tls-key")
    _check_advertised(settled)
    _check_exposure(settled)
    _check_page(settled)
    needed = 2 * settled["journal_limit"]
    if settled["journal_dir"] and settled["journal_space"] < needed:
        raise SettingsUnusable(
            f"--journal-space {settled['journal_space']:g} has no room for one journal, which has two files of "
            f"{settled['journal_limit']:g} MiB (--journal-limit): use {needed:g} or more"
        )


def _check_number(setting: ServiceSetting, value: float) -> None:
    if not math.isfinite(value):
        raise SettingsUnusable(f"invalid {setting.flag} {value}: use a finite number")
    if value < 0:
        raise SettingsUnusable(f"invalid {setting.flag} {value:g}: use 0 or more")
    if setting.kind == "count" and (value < 1 or value != int(value)):
        raise SettingsUnusable(f"invalid {setting.flag} {value:g}: use a whole number, 1 or more")


def _check_advertised(settled: Mapping[str, Any]) -> None:
    """Check that other replicas can redirect agents to this one."""
    first = settled["listen"][0]
    everywhere = not first.startswith("unix:") and first.rpartition(":")[0] in ("0.0.0.0", "[::]", "::", "*")
    if settled["store"].startswith("etcd:") and everywhere and not settled["advertise"]:
        raise SettingsUnusable(
            f"--listen {first} means all addresses of this machine, so other replicas cannot redirect agents to it. "
            "Set --advertise HOST:PORT to the address at which agents reach this replica"
        )


def _check_exposure(settled: Mapping[str, Any]) -> None:
    outward = [address for address in settled["listen"] if not is_loopback(address)]
    if not outward or settled["insecure"]:
        return
    missing = []
    if not settled["tls_cert"]:
        missing.append("TLS (--tls-cert, --tls-key)")
    if not settled["token_keys"] and not settled["client_ca"]:
        missing.append("authentication of clients (--token-keys or --client-ca)")
    if missing:
        raise SettingsUnusable(
            f"{outward[0]} is reachable from other machines without {' and without '.join(missing)}. "
            "Set the options in brackets, or --insecure to serve without them.",
            code=Code.SERVICE_UNPROTECTED,
        )


def _check_page(settled: Mapping[str, Any]) -> None:
    """The page has logins that control jobs, so `--insecure` does not apply to it."""
    if not settled["web"] or is_loopback(settled["web"]):
        return
    missing = [] if settled["tls_cert"] else ["--tls-cert and --tls-key"]
    missing += [] if settled["token_keys"] else ["--token-keys"]
    if missing:
        raise SettingsUnusable(
            f"--web {settled['web']} is reachable from other machines: the page is served there only with TLS and "
            f"tokens. Set {' and '.join(missing)}, or use a loopback address and `ssh -L`"
        )


def check_address(address: str) -> None:
    if address.startswith("unix:"):
        return
    host, colon, port = address.rpartition(":")
    digits = port.isascii() and port.isdigit() and len(port) <= 5
    if not colon or not host or "/" in host or not digits or int(port) > 65_535:
        raise SettingsUnusable(f"invalid address {address!r}: use HOST:PORT, for example 127.0.0.1:{PORT}")


def certificate_files(settled: Mapping[str, Any]) -> dict[str, str]:
    """The files whose certificates end some day, by what they are for."""
    store = dict(parse_qsl(settled["store"].partition("?")[2]))
    files = {name: settled[name] for name in ("tls_cert", "client_ca")}
    files |= {f"store_{name}": store.get(name, "") for name in ("cert", "cacert")}
    return {name: path for name, path in files.items() if path}


def warnings(settled: Mapping[str, Any]) -> list[str]:
    if all(is_loopback(address) for address in settled["listen"]):
        return []
    found = []
    if not settled["tls_cert"]:
        found.append(
            "connections are not encrypted (--insecure): others on the network can read tokens and reports"
        )
    if not settled["token_keys"] and not settled["client_ca"]:
        found.append(
            "clients are not authenticated (--insecure): anyone who can connect to the port can join or abort any job"
        )
    return found
