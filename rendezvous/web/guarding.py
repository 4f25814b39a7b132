"""What protects the page in a browser: headers of answers, and checks of requests that do something."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Any

from rendezvous.web.requests import BadRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rendezvous.web.logins import Session

_BODY_BYTES = 1 << 20
CSRF_HEADER = "x-ddp-csrf"
# Only files of the page itself; no inline script, no inline style; nobody may put the page into a frame.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
_TLS_HEADERS = {"strict-transport-security": "max-age=31536000"}


class Refused(Exception):
    """The request does not come from the page. The message is for its author."""


def with_headers(app: Any, *, is_secure: bool) -> Any:
    added = [(k.encode(), v.encode()) for k, v in {**_HEADERS, **(_TLS_HEADERS if is_secure else {})}.items()]

    async def wrapped(scope: Any, receive: Any, send: Any) -> None:
        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                if not any(name == b"cache-control" for name, _ in headers):
                    headers.append((b"cache-control", b"no-store"))
                message = {**message, "headers": [*headers, *added]}
            await send(message)

        await app(scope, receive, send_with_headers)

    return wrapped


def check_origin(headers: Mapping[str, str]) -> None:
    """Raises `Refused` if a browser says that another site sent the request."""
    if headers.get("sec-fetch-site", "same-origin") != "same-origin":
        raise Refused("this request comes from another site")
    origin = headers.get("origin", "")
    if origin and origin.partition("://")[2] != headers.get("host", ""):
        raise Refused("this request comes from another site")


def check_csrf(headers: Mapping[str, str], session: Session) -> None:
    given = headers.get(CSRF_HEADER, "")
    if not hmac.compare_digest(given.encode(), session.csrf.encode()):
        raise Refused(f"the header {CSRF_HEADER} is missing or wrong: load the page again")


async def body_of(request: Any) -> bytes:
    """Raises `BadRequest` if it is too long or not declared as JSON."""
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise BadRequest("the body must be application/json")
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > _BODY_BYTES:
            raise BadRequest(f"the body is longer than {_BODY_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


def peer_of(request: Any) -> str:
    return request.client.host if request.client is not None else ""
