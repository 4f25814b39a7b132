"""Why nothing comes of a connection although somebody listens there: one side speaks TLS and the other does not, or
does not trust the other. gRPC says of all that no more than that the connection was closed.

What may be wrong is tried out at the same address: a handshake, then the first bytes that any gRPC server answers to.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING

from rendezvous.access.certificates import fault
from rendezvous.access.secret import NAME, as_file
from rendezvous.client.options import ENV

if TYPE_CHECKING:
    from rendezvous.client.options import ClientOptions

NOT_ALLOWED = 77  # the exit code that goes with it
_WITHIN_S = 3.0  # of each try
_ANSWER_S = 1.0  # a server that takes us begins to talk at once
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # and no wishes
_SETTINGS = 4  # the kind of the first frame of an HTTP/2 server
_GIVE_SECRET = f"{ENV}SECRET_FILE (the same secret as the node that serves)"


class _Nothing(Exception):
    """Nobody listens there, or no answer: another story, that others tell."""


async def probe_tls(endpoint: str, options: ClientOptions) -> str:
    """In words, with what to do; "" where nothing of the kind is found."""
    if endpoint.startswith("unix:"):
        return ""
    host, _, port = endpoint.rpartition(":")
    there = (host.strip("[]"), int(port))
    try:
        if options.secret is not None or options.tls:
            return await _with_tls(there, endpoint, options)
        return await _without_tls(there, endpoint)
    except (_Nothing, OSError):
        return ""


async def _without_tls(there: tuple[str, int], endpoint: str) -> str:
    answer = await _answer(there, None, "")
    if _is_http2(answer):
        return ""
    if answer.startswith(b"HTTP/"):
        return f"{endpoint} speaks HTTP, and no gRPC: is that the port of --http, or of another program?"
    if await _speaks_tls(there):
        return (
            f"the service at {endpoint} speaks TLS, and this side does not: set {ENV}CA_FILE (the CA that signed its "
            f"certificate), or {_GIVE_SECRET}"
        )
    return ""


async def _with_tls(there: tuple[str, int], endpoint: str, options: ClientOptions) -> str:
    if words := fault(options.certificate_file, options.key_file, options.ca_file):
        return words
    try:
        answer = await _answer(there, _context(options), _expected_name(there[0], options))
    except ssl.SSLCertVerificationError as error:
        return _distrusted(endpoint, options, error)
    except (ssl.SSLError, ConnectionError):
        if await _speaks_tls(there):
            return _turned_away(endpoint, options)
        if not await _talks_plainly(there):
            return ""
        asked = "it was given a secret" if options.secret is not None else f"{ENV}CA_FILE or {ENV}TLS is set"
        return f"the service at {endpoint} speaks no TLS, and this side does ({asked}): unset it"
    return "" if _is_http2(answer) else _turned_away(endpoint, options)


def _distrusted(endpoint: str, options: ClientOptions, error: ssl.SSLCertVerificationError) -> str:
    if options.secret is not None:
        return f"the service at {endpoint} has another secret than this node: give every node the same {ENV}SECRET_FILE"
    why = error.verify_message.rstrip(".")
    if "not yet valid" in why or "expired" in why:
        return f"the certificate of the service at {endpoint} is not to be trusted: {why}; renew it, or set the clock"
    if "match" in why or "mismatch" in why:
        return (
            f"the certificate of the service at {endpoint} is for another name: {why}; use that name, or say it in "
            f"{ENV}SERVER_NAME"
        )
    known = options.ca_file or "the system's CAs"
    return (
        f"the certificate of the service at {endpoint} is not to be trusted: {why}; it was not signed by {known}: "
        f"does {ENV}CA_FILE name the right CA?"
    )


def _turned_away(endpoint: str, options: ClientOptions) -> str:
    if options.secret is not None:
        return (
            f"the service at {endpoint} does not accept our secret: give every node the same {ENV}SECRET_FILE"
        )
    if options.certificate_file:
        return (
            f"the service at {endpoint} does not accept the client certificate {options.certificate_file}: has it "
            "expired, or did another CA sign it?"
        )
    return f"the service at {endpoint} asks for a client certificate: set {ENV}CERT_FILE and {ENV}KEY_FILE"


# --- trying ----------------------------------------------------------------------------------------------


async def _answer(there: tuple[str, int], context: ssl.SSLContext | None, name: str) -> bytes:
    """Its first bytes; none: it hung up. Raises `_Nothing` if it says nothing, and `ssl.SSLError`."""
    try:
        async with asyncio.timeout(_WITHIN_S):
            expected = name if context is not None else None
            reader, writer = await asyncio.open_connection(*there, ssl=context, server_hostname=expected)
    except TimeoutError:
        raise _Nothing from None
    try:
        writer.write(_HTTP2)
        async with asyncio.timeout(_ANSWER_S):
            return await reader.read(64)
    except TimeoutError:
        raise _Nothing from None
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


async def _speaks_tls(there: tuple[str, int]) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        await _answer(there, context, "")
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # it understood, and objects
    except (ConnectionError, _Nothing):
        return False
    return True


async def _talks_plainly(there: tuple[str, int]) -> bool:
    try:
        return _is_http2(await _answer(there, None, ""))
    except _Nothing:
        return False


def _is_http2(answer: bytes) -> bool:
    return len(answer) >= 9 and answer[3] == _SETTINGS


def _expected_name(host: str, options: ClientOptions) -> str:
    return NAME if options.secret is not None else options.server_name or host


def _context(options: ClientOptions) -> ssl.SSLContext:
    if options.secret is not None:
        context = ssl.create_default_context(cadata=options.secret.certificate.decode())
        with as_file(options.secret.key + options.secret.certificate) as path:
            context.load_cert_chain(path)
    else:
        context = ssl.create_default_context(cafile=options.ca_file or None)
        if options.certificate_file:
            context.load_cert_chain(options.certificate_file, options.key_file)
    context.set_alpn_protocols(["h2"])
    return context
