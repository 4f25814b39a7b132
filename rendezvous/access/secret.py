"""A job's secret: one PEM text that is the identity of whoever serves, and the pass of whoever connects.

Theory of operation
-------------------
It holds a private key and a certificate that the key signed itself. The one who serves shows the certificate, those
who connect show it too, and either side trusts this one and no other. So whoever has the text has a connection that
nobody else can read or join, and there is no authority to set up, no name to get right, and no token beside it. All who
have it are equals: any of them could serve. That fits the nodes of one job, and nobody beyond them; a service that many
share has certificates and tokens of its own.

It is valid from long ago, for the clocks of machines differ, and far longer than any job.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "ddp-launch"  # in every such certificate; what is trusted is the certificate itself
_BLOCK = re.compile(r"-----BEGIN ([A-Z ]+)-----\n.*?\n-----END \1-----\n?", re.DOTALL)
_LONGEST = 64 * 1024
_YEARS = 10
_CONFIG = f"""
[ca]
default_ca = ours
[ours]
database = index
serial = serial
new_certs_dir = .
default_md = sha256
policy = any
x509_extensions = leaf
[any]
commonName = supplied
[leaf]
subjectAltName = DNS:{NAME}
extendedKeyUsage = serverAuth, clientAuth
[req]
distinguished_name = name
[name]
"""


class SecretUnusable(ValueError):
    """In words for whoever gave it; what is in it stands in none of them."""


@dataclass(frozen=True, slots=True)
class Secret:
    key: bytes = field(repr=False)
    certificate: bytes


def parse(text: str, where: str) -> Secret:
    """Raises `SecretUnusable`."""
    blocks = {found[1]: found[0] for found in _BLOCK.finditer(text.replace("\r\n", "\n"))}
    key = next((block for kind, block in blocks.items() if kind.endswith("PRIVATE KEY")), "")
    certificate = blocks.get("CERTIFICATE", "")
    if not key or not certificate or not (key + certificate).isascii():
        raise SecretUnusable(
            f"{where} is no secret of a job: a private key and a certificate; `ddp-rendezvous secret` makes one"
        )
    found = Secret(key.encode(), certificate.encode())
    if not _belong_together(found):
        raise SecretUnusable(f"{where} is damaged: its key is not that of its certificate; make a new one")
    return found


def _belong_together(secret: Secret) -> bool:
    import ssl

    with as_file(secret.key + secret.certificate) as path:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(path, password="")
        except ssl.SSLError:
            return False
    return True


@contextlib.contextmanager
def as_file(content: bytes) -> Iterator[str]:
    """Without a name on any disk."""
    with os.fdopen(os.memfd_create("secret", os.MFD_CLOEXEC), "wb", buffering=0) as file:
        file.write(content)
        yield f"/proc/self/fd/{file.fileno()}"


def read(path: str) -> Secret:
    """Raises `SecretUnusable`."""
    try:
        with open(path, encoding="ascii") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(_LONGEST)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SecretUnusable(f"cannot read the secret in {path}: {reason}") from error
    if mode & stat.S_IRWXO:
        raise SecretUnusable(f"{path} is open to others than its owner and group: chmod 600 {path}")
    return parse(text, path)


def make() -> str:
    """A new one. Raises `SecretUnusable`."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="ddp-secret-") as folder:
        for name, text in (("config", _CONFIG), ("index", ""), ("serial", f"{os.urandom(8).hex()}\n")):
            with open(os.path.join(folder, name), "w", encoding="ascii") as file:
                file.write(text)
        words = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", "key")
        _openssl(folder, "req", "-config", "config", *words, "-subj", f"/CN={NAME}", "-out", "request")
        end = f"{time.gmtime().tm_year + _YEARS}0101000000Z"
        dates = ("-startdate", "20200101000000Z", "-enddate", end)
        signed = ("-selfsign", "-keyfile", "key", "-in", "request", "-out", "certificate")
        _openssl(folder, "ca", "-config", "config", "-batch", "-notext", *dates, *signed)
        found = ""
        for name in ("key", "certificate"):
            with open(os.path.join(folder, name), encoding="ascii") as file:
                found += file.read()
    return found


def write_new(path: str) -> None:
    """For its owner alone, whatever the umask; one that is there stays. Raises `SecretUnusable`."""
    text = make()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise SecretUnusable(f"{path} is there already; remove it first, or name another file") from None
    except OSError as error:
        raise SecretUnusable(f"cannot write {path}: {error.strerror}") from error
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text)


def _openssl(folder: str, *words: str) -> None:
    import subprocess

    try:
        subprocess.run(("openssl", *words), cwd=folder, check=True, capture_output=True, timeout=30.0)
    except FileNotFoundError:
        raise SecretUnusable(
            "openssl is not on PATH, and it makes the key; install it here, or make the secret on another machine"
        ) from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
        raise SecretUnusable(f"openssl could not make a key: {said[-1]}") from error
