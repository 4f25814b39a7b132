"""The secret of a job: one PEM text that authenticates both the serving node and the nodes that connect to it.

Theory of operation
-------------------
The secret contains a private key and a self-signed certificate. Both sides of a connection present this certificate,
and each side trusts only this certificate. So holders of the secret get encrypted and authenticated connections. No
certificate authority, host names or tokens are needed. All holders of the secret have the same rights: any of them can
run the service. This is meant for the nodes of one job. A service that several users share has its own certificates and
tokens.

The certificate is valid from a date in the past, since clocks of machines differ, and far longer than any job.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rendezvous.values.error_codes import Code, Coded

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


class SecretUnusable(Coded, ValueError):
    """The secret is invalid. The message is for the user and never contains the secret."""

    code = Code.SECRET_UNUSABLE


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
            f"{where} is not a job secret: it must contain a private key and a certificate in PEM format. "
            "`ddp-rendezvous secret` creates one."
        )
    found = Secret(key.encode(), certificate.encode())
    if not _belong_together(found):
        raise SecretUnusable(
            f"{where} is damaged: its key does not match its certificate. Create a new one: `ddp-rendezvous secret`"
        )
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
    """Provide a path for `content`; on Linux without writing it to a disk."""
    if not hasattr(os, "memfd_create"):
        import tempfile  # slow to load

        with tempfile.NamedTemporaryFile(prefix="ddp-secret-", buffering=0) as private:
            private.write(content)
            yield private.name
        return
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
        reason = error.strerror if isinstance(error, OSError) else "it is not a PEM file"
        raise SecretUnusable(
            f"cannot read the secret in {path}: {reason}. Check DDP_RENDEZVOUS_SECRET_FILE"
        ) from error
    if mode & stat.S_IRWXO:
        raise SecretUnusable(
            f"refusing to use {path}: it contains a secret, and other users have access to it. Run: chmod 600 {path}"
        )
    return parse(text, path)


def make() -> str:
    """Create a new secret. Raises `SecretUnusable`."""
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
    """Write a new secret to a new file with mode 600, whatever the umask is. Raises `SecretUnusable`."""
    text = make()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise SecretUnusable(f"{path} already exists: remove it first, or name another file") from None
    except OSError as error:
        raise SecretUnusable(
            f"cannot write the secret to {path}: {error.strerror}. Check its directory and permissions"
        ) from error
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text)


def _openssl(folder: str, *words: str) -> None:
    import subprocess

    try:
        subprocess.run(("openssl", *words), cwd=folder, check=True, capture_output=True, timeout=30.0)
    except FileNotFoundError:
        raise SecretUnusable(
            "cannot create a key: openssl is not on PATH. Install it, or create the secret on another machine."
        ) from None
    except subprocess.CalledProcessError as error:
        output = error.stderr.decode(errors="replace").strip().splitlines() or [
            f"exit code {error.returncode}"
        ]
        raise SecretUnusable(
            f"openssl could not create a key: {output[-1]}. "
            "Check the installation of openssl, or create the secret on another machine"
        ) from error


# --- check certificate and key files, since gRPC reports only that it could not use them ------------

_CERTIFICATE, _KEY = b"CERTIFICATE-----", b"PRIVATE KEY-----"


def file_problem(certificate: str, key: str, authority: str) -> str:
    """Describe the problem with these files; "" if there is none. An empty path is not checked. Raises `OSError`."""
    for path, mark, kind in (
        (authority, _CERTIFICATE, "certificate"),
        (certificate, _CERTIFICATE, "certificate"),
        (key, _KEY, "private key"),
    ):
        if path and mark not in Path(path).read_bytes():
            return f"{path} does not contain a {kind} in PEM format"
    if certificate and key and not _key_is_of_certificate(certificate, key):
        return (
            f"the key in {key} cannot be used with the certificate in {certificate}. Check that they belong together, "
            "that the key is not encrypted, and that neither file is damaged"
        )
    return ""


def _key_is_of_certificate(certificate: str, key: str) -> bool:
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("ALL:@SECLEVEL=0")  # the strength of the keys is not checked here
    try:
        context.load_cert_chain(certificate, key, password="")  # without it, OpenSSL prompts at the terminal
    except ssl.SSLError:
        return False
    return True


# --- when certificates end --------------------------------------------------------------------------

_VERSION, _UTC_TIME = 0xA0, 0x17  # tags of DER


def ends_of(path: str) -> list[float]:
    """When each certificate of a PEM file ends, as `time.time`. Raises `OSError`, `ValueError`."""
    text = Path(path).read_text("ascii", "replace")
    blocks = [found[0] for found in _BLOCK.finditer(text.replace("\r\n", "\n")) if found[1] == "CERTIFICATE"]
    if not blocks:
        raise ValueError(f"{path} does not contain a certificate in PEM format")
    return [_end_of(block) for block in blocks]


def _end_of(block: str) -> float:
    import calendar
    import ssl

    try:
        (_, whole), *_ = _parts_of(ssl.PEM_cert_to_DER_cert(block))
        (_, signed), *_ = _parts_of(whole)
        fields = [each for each in _parts_of(signed) if each[0] != _VERSION]
        _serial, _algorithm, _issuer, (_, validity), *_ = fields
        _, (kind, end) = _parts_of(validity)
        text = end.decode("ascii")
        century = ("20" if text < "50" else "19") if kind == _UTC_TIME else ""
        return float(calendar.timegm(time.strptime(century + text, "%Y%m%d%H%M%SZ")))
    except (IndexError, ValueError) as error:
        raise ValueError("a certificate is damaged") from error


def _parts_of(data: bytes) -> list[tuple[int, bytes]]:
    """The tag and the content of each element (DER)."""
    found: list[tuple[int, bytes]] = []
    while data:
        tag, size, start = data[0], data[1], 2
        if size & 0x80:
            start = 2 + (size & 0x7F)
            size = int.from_bytes(data[2:start])
        found.append((tag, data[start : start + size]))
        data = data[start + size :]
    return found
