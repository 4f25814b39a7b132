"""A certificate authority of a test's own, made with openssl."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class Authority:
    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.certificate = str(folder / f"{name}.pem")
        self._key = str(folder / f"{name}.key")
        self._run(
            "req",
            "-x509",
            *self._new(self._key),
            "-out",
            self.certificate,
            "-subj",
            f"/CN={name}",
            "-days",
            "1",
        )

    def issue(self, name: str, days: int = 1, dates: tuple[str, ...] = ()) -> tuple[str, str]:
        """Certificate and key."""
        certificate, key = str(self.folder / f"{name}.pem"), str(self.folder / f"{name}.key")
        request, names = str(self.folder / f"{name}.csr"), self.folder / f"{name}.ext"
        names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        self._run("req", *self._new(key), "-out", request, "-subj", f"/CN={name}")
        signing = ("-CA", self.certificate, "-CAkey", self._key, "-CAcreateserial", "-extfile", str(names))
        self._run("x509", "-req", "-in", request, *signing, "-out", certificate, "-days", str(days), *dates)
        return certificate, key

    @staticmethod
    def _new(key: str) -> tuple[str, ...]:
        return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", key)

    @staticmethod
    def _run(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=100)
