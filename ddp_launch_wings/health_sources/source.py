"""Asks one health source: a URL, a file, or the Kubernetes API about the node of this pod."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from ddp_launch_wings.health_sources import findings
from ddp_launch_wings.health_sources.findings import NotUnderstood, line
from launcher.sources import HealthFinding, SourceFailed
from rendezvous.values.late_dataclass import dataclass

if TYPE_CHECKING:
    import http.client
    import ssl


KUBERNETES = "kubernetes"
WITHIN_S = 3.0
_LARGEST = 8 << 20
_FORBIDDEN = 403
_CHUNK = 1 << 16
_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
_NAME = "NODE_NAME"


@dataclass(frozen=True, slots=True)
class Source:
    """`place`: what --health-source names. `account`: the folder of the pod's service account."""

    place: str
    ignored: tuple[str, ...] = ()
    account: str = _ACCOUNT
    within_s: float = WITHIN_S

    def ask(self, environ: Mapping[str, str]) -> tuple[HealthFinding, ...]:
        """Raise SourceFailed, after some seconds at most."""
        try:
            text = self._text(environ)
            return findings.findings(text, environ.get(_NAME) or socket.gethostname(), self.ignored)
        except NotUnderstood as error:
            raise SourceFailed(f"its answer is not understood: {error}") from None
        except TimeoutError:
            raise SourceFailed(f"no answer within {self.within_s:g} s") from None
        except OSError as error:
            raise SourceFailed(line(error.strerror or str(error))) from None
        except ValueError as error:
            raise SourceFailed(line(str(error))) from None

    def _text(self, environ: Mapping[str, str]) -> str:
        if self.place == KUBERNETES:
            return self._ask_kubernetes(environ)
        if self.place.startswith(("http://", "https://")):
            return _get(self.place, {}, None, self.within_s)
        return _read(self.place.removeprefix("file://"))

    def _ask_kubernetes(self, environ: Mapping[str, str]) -> str:
        host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise SourceFailed("this process does not run in a pod (KUBERNETES_SERVICE_HOST is not set)")
        name = environ.get(_NAME)
        if not name:
            raise SourceFailed(f"{_NAME} is not set; set it from spec.nodeName in the pod's environment")
        import ssl

        try:
            # Read each time: the kubelet replaces the token before it expires.
            with open(f"{self.account}/token", encoding="ascii") as file:
                token = file.read().strip()
        except OSError as error:
            raise SourceFailed(
                f"no token of a service account ({error.strerror}); set automountServiceAccountToken: true"
            ) from None
        trusted = ssl.create_default_context(cafile=f"{self.account}/ca.crt")
        where = f"[{host}]" if ":" in host else host
        url = f"https://{where}:{port}/api/v1/nodes/{quote(name, safe='')}"
        return _get(url, {"Authorization": f"Bearer {token}"}, trusted, self.within_s)


def _read(path: str) -> str:
    """Without waiting for a writer, if the file is a pipe."""
    with open(path, encoding="utf-8", errors="replace", opener=_at_once) as file:
        return file.read(_LARGEST)


def _at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _get(url: str, headers: Mapping[str, str], trusted: ssl.SSLContext | None, within_s: float) -> str:
    """Without proxies and redirects: sources are close, and a token must not go elsewhere."""
    parts = urlsplit(url)
    if not parts.hostname:
        raise SourceFailed(f"{url} names no host")
    import http.client  # with all of email: only jobs with such a source need it

    until = time.monotonic() + within_s
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        connection = http.client.HTTPSConnection(
            parts.hostname, parts.port, timeout=within_s, context=trusted
        )
    else:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=within_s)
    try:
        path = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
        connection.request("GET", path, headers={"Accept": "*/*", "User-Agent": "ddp-launch", **headers})
        with connection.getresponse() as response:
            body = _body(response, until)
            if response.status != http.client.OK:
                raise SourceFailed(_status(response, url))
            return body.decode(errors="replace")
    except http.client.HTTPException as error:
        raise SourceFailed(f"its answer is not HTTP ({type(error).__name__})") from None
    finally:
        connection.close()


def _status(response: http.client.HTTPResponse, url: str) -> str:
    if response.status == _FORBIDDEN and "/api/v1/nodes/" in url:
        return "403 Forbidden: the service account may not read nodes; see deploy/jobs/node-reader.yaml"
    return f"{response.status} {response.reason}"


def _body(response: http.client.HTTPResponse, until: float) -> bytes:
    """A server that sends byte by byte must not hold the caller."""
    read = bytearray()
    while chunk := response.read1(_CHUNK):
        read += chunk
        if time.monotonic() > until:
            raise TimeoutError
        if len(read) > _LARGEST:
            raise SourceFailed(f"its answer is larger than {_LARGEST >> 20} MiB")
    return bytes(read)
