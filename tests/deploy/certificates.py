"""A certificate authority of the test's own, as files like those of a mounted secret: ca.crt, tls.crt, tls.key."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def _openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=60)


class Authority:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self._key, self.certificate = str(folder / "ca.key"), str(folder / "ca.crt")
        _openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"),
            *("-subj", "/CN=test CA", "-keyout", self._key, "-out", self.certificate),
        )

    def issue(self, folder: Path, name: str, also: Sequence[str] = ()) -> Path:
        """Into `folder`, in place of what is there: each file whole or not at all, as a kubelet does it."""
        folder.mkdir(parents=True, exist_ok=True)
        made = folder / ".new"
        made.mkdir(exist_ok=True)
        extensions = made / "extensions"
        names = ",".join(also) or f"DNS:{name}"
        extensions.write_text(f"subjectAltName={names}\nextendedKeyUsage=serverAuth,clientAuth\n")
        _openssl(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-subj", f"/CN={name}", "-keyout", str(made / "tls.key"), "-out", str(made / "request")),
        )
        _openssl(
            *("x509", "-req", "-in", str(made / "request"), "-CA", self.certificate, "-CAkey", self._key),
            *("-days", "2", "-extfile", str(extensions), "-out", str(made / "tls.crt"), "-CAcreateserial"),
        )
        shutil.copy(self.certificate, made / "ca.crt")
        for each in ("ca.crt", "tls.crt", "tls.key"):
            (made / each).chmod(0o644)  # a kubelet would give them to the pod's group
            os.replace(made / each, folder / each)
        shutil.rmtree(made)
        return folder
