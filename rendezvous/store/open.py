"""Open a store from its URL.

    memory
    file:PATH
    etcd://[USER@]HOST[:PORT][,HOST[:PORT]...][/PREFIX][?tls=true&cacert=FILE&cert=FILE&key=FILE&password-file=FILE]

The password comes from the file, from DDP_RENDEZVOUS_ETCD_PASSWORD, or from USER:PASSWORD@ in the URL. Write
USER:PASSWORD@ only in a configuration file, since every user of the machine can read a command line. No message
contains the password.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote

from rendezvous.store.protocol import StoreError
from rendezvous.values.error_codes import Code

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rendezvous.store.etcd_client import Access, TlsFiles
    from rendezvous.store.protocol import Store

PASSWORD_VARIABLE = "DDP_RENDEZVOUS_ETCD_PASSWORD"
_PORT = 2379
_SETTINGS = ("tls", "cacert", "cert", "key", "password-file")


class BadUrl(StoreError):
    """The URL does not name a store that can be opened: it is wrong, whatever the state of the store is."""

    code = Code.STORE_URL_INVALID


async def open_store(url: str, address: str = "", environ: Mapping[str, str] = os.environ) -> Store:
    """Open the store. `address` is where agents reach this replica."""
    scheme, colon, rest = url.partition(":")
    if url == "memory":
        from rendezvous.store.memory import MemoryStore

        return MemoryStore(address)
    if scheme == "file" and rest:
        from rendezvous.store.file import open_file_store

        return await open_file_store(rest.removeprefix("//"), address)
    if scheme == "etcd" and rest.startswith("//"):
        from rendezvous.store.etcd import open_etcd_store

        access, prefix = parse_etcd(rest[2:], environ)
        return await open_etcd_store(access, prefix, address)
    raise BadUrl(f"unknown store {scheme}{colon}: use memory, file:PATH or etcd://HOST:PORT,.../PREFIX")


def parse_etcd(rest: str, environ: Mapping[str, str]) -> tuple[Access, str]:
    from rendezvous.store.etcd_client import Access

    place, _, query = rest.partition("?")
    settings = dict(parse_qsl(query, keep_blank_values=True))
    for name in settings:
        if name not in _SETTINGS:
            raise BadUrl(f"etcd store: unknown setting {name!r}; known settings: {', '.join(_SETTINGS)}")
    authority, _, prefix = place.partition("/")
    who, _, hosts = authority.rpartition("@")
    user, _, in_url = who.partition(":")
    endpoints = tuple(_endpoint(host) for host in hosts.split(",") if host)
    if not endpoints:
        raise BadUrl("etcd store: the host is missing; write etcd://HOST:PORT/PREFIX")
    password = _password(settings.get("password-file", ""), environ.get(PASSWORD_VARIABLE) or unquote(in_url))
    return Access(endpoints, unquote(user), password, _tls(settings)), prefix.strip("/") or "ddp-rendezvous"


def _endpoint(host: str) -> str:
    """Add the default port. Accepts host names, IPv4, and IPv6 in brackets."""
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]"):
        return f"{host}:{_PORT}"
    if not name or not re.fullmatch(r"\d{1,5}", port, re.ASCII):
        raise BadUrl(f"etcd store: invalid address {host!r}: use HOST:PORT")
    return host


def _password(path: str, given: str) -> Callable[[], str]:
    if not path:
        return lambda: given

    def read() -> str:
        try:
            with open(path, encoding="utf-8") as file:
                return file.read().strip()
        except OSError as error:
            raise BadUrl(
                f"cannot read the etcd password from {path}: {error.strerror}. Check password-file in --store"
            ) from error

    return read


def _tls(settings: Mapping[str, str]) -> TlsFiles | None:
    from rendezvous.store.etcd_client import TlsFiles

    files = TlsFiles(settings.get("cacert", ""), settings.get("cert", ""), settings.get("key", ""))
    if bool(files.cert) != bool(files.key):
        raise BadUrl("etcd store: cert and key must be set together: set both or neither")
    wanted = settings.get("tls", "true" if files != TlsFiles() else "false")
    if wanted not in ("true", "false"):
        raise BadUrl(f"etcd store: invalid tls {wanted!r}: use true or false")
    return files if wanted == "true" else None
