"""What `ddp-rendezvous serve` was asked for: flags over environment over configuration file over defaults."""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rendezvous.client.options import is_loopback
from rendezvous.values.wire_names import PORT

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

ENV = "DDP_RENDEZVOUS_"


class SettingsUnusable(ValueError):
    """In words for whoever starts the service."""


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    kind: str  # text, list, flag, number, count
    default: Any
    help: str
    choices: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


SETTINGS = (
    Setting("listen", "list", (f"127.0.0.1:{PORT}",), "HOST:PORT to serve on; may be given several times"),
    Setting(
        "advertise", "text", "", "HOST:PORT at which agents reach this replica (default: the first --listen)"
    ),
    Setting("store", "text", "memory", "memory, file:PATH, or etcd://HOST:PORT,.../PREFIX"),
    Setting("http", "text", "", "HOST:PORT for /livez, /readyz and /metrics (default: none)"),
    Setting("token_keys", "text", "", "file with the keys of tokens; without it, no token is asked for"),
    Setting("tls_cert", "text", "", "the service's certificate (PEM); read again when it changes"),
    Setting("tls_key", "text", "", "its private key (PEM)"),
    Setting("client_ca", "text", "", "every client must have a certificate signed by this CA (PEM)"),
    Setting(
        "insecure",
        "flag",
        False,
        "serve others than this machine without TLS, or without knowing who they are",
    ),
    Setting("history", "number", 14.0, "days for which finished jobs are kept"),
    Setting("resume_grace", "number", 1.0, "seconds for which an agent may be gone before it counts as lost"),
    Setting("max_jobs", "count", 1000, "jobs that are not over"),
    Setting("max_agents", "count", 65_536, "agents, over all jobs"),
    Setting("log_format", "text", "text", "text or json", ("text", "json")),
    Setting(
        "log_level", "text", "info", "debug, info, warning or error", ("debug", "info", "warning", "error")
    ),
    Setting("reflection", "flag", False, "tell clients the schema (grpc.reflection.v1)"),
)
_BY_NAME = {setting.name: setting for setting in SETTINGS}
_TRUE, _FALSE = ("1", "true", "yes"), ("", "0", "false", "no")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", default=None, help="TOML file with any of these settings (listen = [...])"
    )
    for setting in SETTINGS:
        default = f" (default: {setting.default})" if setting.default not in ("", False) else ""
        words = f"{setting.help}{default} [{ENV}{setting.name.upper()}]".replace("%", "%%")
        match setting.kind:
            case "flag":
                parser.add_argument(setting.flag, action="store_true", default=None, help=words)
            case "list":
                parser.add_argument(setting.flag, action="append", help=words)
            case "number" | "count":
                parser.add_argument(setting.flag, type=float, help=words)
            case _:
                parser.add_argument(setting.flag, choices=setting.choices or None, help=words)


def settle(arguments: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, Any]:
    """Raises `SettingsUnusable`."""
    config = arguments.config or environ.get(f"{ENV}CONFIG", "")
    settled = {setting.name: setting.default for setting in SETTINGS}
    if config:
        settled |= _from_file(config)
    settled |= {s.name: _from_text(s, environ[_env(s)], _env(s)) for s in SETTINGS if _env(s) in environ}
    given = {s.name: getattr(arguments, s.name) for s in SETTINGS}
    if re.match(r"etcd://[^/@]*:[^/]*@", given["store"] or ""):
        raise SettingsUnusable(
            "--store holds a password, which everyone on this machine can read in the list of processes: write USER@, "
            "and give the password with ?password-file=FILE or DDP_RENDEZVOUS_ETCD_PASSWORD"
        )
    settled |= {name: value for name, value in given.items() if value is not None}
    _check(settled)
    return settled


def _env(setting: Setting) -> str:
    return ENV + setting.name.upper()


def _from_file(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            found = tomllib.load(file)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise SettingsUnusable(f"cannot read {path}: {error}") from error
    return {name.replace("-", "_"): _from_toml(path, name.replace("-", "_"), found[name]) for name in found}


def _from_toml(path: str, name: str, value: Any) -> Any:
    setting = _BY_NAME.get(name)
    if setting is None:
        raise SettingsUnusable(f"{path}: there is no setting {name}")
    match setting.kind, value:
        case ("flag", bool()) | ("text", str()):
            return value
        case ("number" | "count", int() | float()) if not isinstance(value, bool):
            return value
        case ("list", list()) if all(isinstance(item, str) for item in value):
            return value
        case ("list", str()):
            return [value]
    raise SettingsUnusable(f"{path}: {name} is a {setting.kind}, not {value!r}")


def _from_text(setting: Setting, text: str, where: str) -> Any:
    match setting.kind:
        case "list":
            return [item.strip() for item in text.split(",") if item.strip()]
        case "flag" if text.lower() in (*_TRUE, *_FALSE):
            return text.lower() in _TRUE
        case "number" | "count":
            try:
                return float(text)
            except ValueError:
                raise SettingsUnusable(f"{where} is a number, not {text!r}") from None
        case "text":
            return text
    raise SettingsUnusable(f"{where} is true or false, not {text!r}")


def _check(settled: Mapping[str, Any]) -> None:
    for setting in SETTINGS:
        if setting.choices and settled[setting.name] not in setting.choices:
            raise SettingsUnusable(f"{setting.flag} is one of {', '.join(setting.choices)}")
        if setting.kind in ("number", "count"):
            _check_number(setting, settled[setting.name])
    for address in (*settled["listen"], *filter(None, (settled["http"], settled["advertise"]))):
        check_address(address)
    if not settled["listen"]:
        raise SettingsUnusable("--listen names no address")
    if bool(settled["tls_cert"]) != bool(settled["tls_key"]):
        raise SettingsUnusable("--tls-cert and --tls-key go together")
    if settled["client_ca"] and not settled["tls_cert"]:
        raise SettingsUnusable("--client-ca needs --tls-cert and --tls-key")
    _check_way_here(settled)
    _check_exposure(settled)


def _check_number(setting: Setting, value: float) -> None:
    if not math.isfinite(value):
        raise SettingsUnusable(f"{setting.flag} is a number, not {value}")
    if value < 0:
        raise SettingsUnusable(f"{setting.flag} cannot be negative")
    if setting.kind == "count" and (value < 1 or value != int(value)):
        raise SettingsUnusable(f"{setting.flag} is a whole number from 1, not {value:g}")


def _check_way_here(settled: Mapping[str, Any]) -> None:
    """With several replicas, the others send agents to this one."""
    first = settled["listen"][0]
    everywhere = not first.startswith("unix:") and first.rpartition(":")[0] in ("0.0.0.0", "[::]", "::", "*")
    if settled["store"].startswith("etcd:") and everywhere and not settled["advertise"]:
        raise SettingsUnusable(
            f"other replicas cannot send agents to {first}, which is every address of this machine: "
            "--advertise HOST:PORT says at which of them agents reach it"
        )


def _check_exposure(settled: Mapping[str, Any]) -> None:
    outward = [address for address in settled["listen"] if not is_loopback(address)]
    if not outward or settled["insecure"]:
        return
    missing = []
    if not settled["tls_cert"]:
        missing.append("TLS (--tls-cert, --tls-key)")
    if not settled["token_keys"] and not settled["client_ca"]:
        missing.append("way to know who calls (--token-keys or --client-ca)")
    if missing:
        raise SettingsUnusable(
            f"{outward[0]} can be reached from other machines, and there is no {' and no '.join(missing)}; "
            "--insecure serves all the same"
        )


def check_address(address: str) -> None:
    if address.startswith("unix:"):
        return
    host, colon, port = address.rpartition(":")
    digits = port.isascii() and port.isdigit() and len(port) <= 5
    if not colon or not host or "/" in host or not digits or int(port) > 65_535:
        raise SettingsUnusable(f"{address!r} is not HOST:PORT")


def warnings(settled: Mapping[str, Any]) -> list[str]:
    if all(is_loopback(address) for address in settled["listen"]):
        return []
    found = []
    if not settled["tls_cert"]:
        found.append("connections are not encrypted (--insecure): tokens and reports can be read on the way")
    if not settled["token_keys"] and not settled["client_ca"]:
        found.append("whoever reaches the port may join, and abort, any job (--insecure)")
    return found
