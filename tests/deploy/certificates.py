"""Certificate authorities of the tests' own, and what cert-manager would make of a Certificate with them."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

Files = dict[str, bytes]

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def _openssl(*words: str | Path) -> bytes:
    return subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=60).stdout


class Authority:
    def __init__(self, name: str) -> None:
        self.name = name
        with tempfile.TemporaryDirectory() as folder:
            key, certificate = Path(folder, "ca.key"), Path(folder, "ca.crt")
            _openssl(
                "req",
                "-x509",
                *_KEY,
                "-days",
                "2",
                "-subj",
                f"/CN={name}",
                "-keyout",
                key,
                "-out",
                certificate,
            )
            self._key, self.certificate = key.read_bytes(), certificate.read_bytes()

    def issue(self, wanted: Mapping[str, Any], *trusted: Authority) -> Files:
        """The secret that a Certificate's `spec` asks for. `trusted`: further authorities to be trusted."""
        names = [f"DNS:{each}" for each in wanted.get("dnsNames", [])]
        names += [f"IP:{each}" for each in wanted.get("ipAddresses", [])]
        usages = [
            {"server auth": "serverAuth", "client auth": "clientAuth"}.get(u, "") for u in wanted["usages"]
        ]
        extensions = [f"extendedKeyUsage={','.join(filter(None, usages))}"]
        if names:
            extensions.append(f"subjectAltName={','.join(names)}")
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            for name, content in (("ca.key", self._key), ("ca.crt", self.certificate)):
                (folder / name).write_bytes(content)
            (folder / "extensions").write_text("\n".join(extensions) + "\n")
            subject = f"/CN={wanted['commonName']}"
            _openssl(
                "req", *_KEY, "-subj", subject, "-keyout", folder / "tls.key", "-out", folder / "request"
            )
            _openssl(
                *("x509", "-req", "-in", folder / "request", "-days", "2", "-CAcreateserial"),
                *("-CA", folder / "ca.crt", "-CAkey", folder / "ca.key"),
                *("-extfile", folder / "extensions", "-out", folder / "tls.crt"),
            )
            made = {name: (folder / name).read_bytes() for name in ("tls.crt", "tls.key")}
        return made | {"ca.crt": b"".join(each.certificate for each in (self, *trusted))}


def issuer_of(certificate: str) -> str:
    """The common name of who signed this PEM."""
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(certificate)
        file.flush()
        return _openssl("x509", "-in", file.name, "-noout", "-issuer").decode().rpartition("=")[2].strip()
