"""gRPC channels to the service, for agents and for ddpctl."""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
from collections.abc import Sequence

import grpc
import grpc.aio

from rendezvous.access.secret import NAME, as_file, file_problem
from rendezvous.client.credential_files import ENV, ClientOptions, OptionsUnusable, current_token, is_loopback
from rendezvous.client.session_rules import CONNECT_S, PATIENCE_S, PING_AFTER_S
from rendezvous.values.contracts import OWNER_METADATA, VERSION, VERSION_METADATA

_OPTIONS = (
    ("grpc.max_receive_message_length", 4 * 1024 * 1024),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.bdp_probe", 0),  # do not ping with each message: our messages never fill the windows
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
)


def open_channel(
    endpoint: str,
    options: ClientOptions,
    patience_s: float = PATIENCE_S,
    ping_after_s: float = PING_AFTER_S,
    connect_s: float = CONNECT_S,
) -> grpc.aio.Channel:
    """Open a channel. It fails if the service does not answer a ping within `patience_s`.

    Certificates are read again each time. Raises `OptionsUnusable`.
    """
    patience_ms = int(patience_s * 1000)
    tuned = (
        *_OPTIONS,
        ("grpc.min_reconnect_backoff_ms", int(connect_s * 1000)),  # also the connection timeout
        ("grpc.keepalive_time_ms", int(ping_after_s * 1000)),
        ("grpc.keepalive_timeout_ms", patience_ms),
        ("grpc.http2.ping_timeout_ms", patience_ms),
    )
    if options.secret is not None:
        key, certificate = options.secret.key, options.secret.certificate
        ours = grpc.ssl_channel_credentials(certificate, key, certificate)
        return grpc.aio.secure_channel(_target(endpoint), ours, options=(*tuned, *_named(NAME)))
    if not options.tls:
        if options.token and not options.insecure and not is_loopback(endpoint):
            raise OptionsUnusable(
                f"refusing to send the token to {endpoint} without encryption: set DDP_RENDEZVOUS_CA_FILE or "
                "DDP_RENDEZVOUS_TLS=1 to use TLS, or DDP_RENDEZVOUS_INSECURE=1 to send it anyway"
            )
        return grpc.aio.insecure_channel(_target(endpoint), options=tuned)
    try:
        credentials = grpc.ssl_channel_credentials(
            _read(options.ca_file), _read(options.key_file), _read(options.certificate_file)
        )
    except OSError as error:
        names = f"{ENV}CA_FILE, {ENV}CERT_FILE and {ENV}KEY_FILE"
        raise OptionsUnusable(f"cannot read {error.filename}: {error.strerror}. Check {names}") from error
    return grpc.aio.secure_channel(
        _target(endpoint), credentials, options=(*tuned, *_named(options.server_name))
    )


def _named(server_name: str) -> tuple[tuple[str, str], ...]:
    return (("grpc.ssl_target_name_override", server_name),) if server_name else ()


def _target(endpoint: str) -> str:
    """Add the scheme `ipv4:` or `ipv6:` to an IP address, so that gRPC does not resolve it as a name."""
    host, _, port = endpoint.rpartition(":")
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return endpoint
    return f"ipv4:{host}:{port}" if address.version == 4 else f"ipv6:[{address}]:{port}"


def metadata(options: ClientOptions) -> tuple[tuple[str, str], ...]:
    token = current_token(options)
    version = (VERSION_METADATA, VERSION)
    return (("authorization", f"Bearer {token}"), version) if token else (version,)


def _read(path: str) -> bytes | None:
    if not path:
        return None
    with open(path, "rb") as file:
        return file.read()


# --- route ------------------------------------------------------------------------------------------
#
# Which endpoint to call: the replica that owns the job, once a redirect has given its address.


class Route:
    """Uses the endpoints in turn. A redirect applies only to the next call."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._endpoints, self._at = tuple(endpoints), 0
        self.owner = ""  # from the latest redirect

    @property
    def endpoint(self) -> str:
        return self.owner or self._endpoints[self._at % len(self._endpoints)]

    def refused(self, error: grpc.aio.AioRpcError) -> None:
        trailing = error.trailing_metadata() or ()
        self.owner = next((str(value) for key, value in trailing if key == OWNER_METADATA), "")
        self._at += 1


# --- TLS probe: find out why a connection fails although the port is open ---------------------------
#
# Either one side uses TLS and the other does not, or one side does not trust the other. gRPC reports both cases only
# as a closed connection. The probe connects to the same address, does a TLS handshake, and sends the first bytes of
# HTTP/2. Every gRPC server answers these.

_WITHIN_S = 3.0  # timeout of each handshake
_ANSWER_S = 1.0  # a server that accepts the connection sends its settings at once
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # and empty settings
_SETTINGS = 4  # the kind of the first frame of an HTTP/2 server
_SECRET = f"--secret-file (or {ENV}SECRET_FILE)"
_GIVE_SECRET = f"{_SECRET} for a job with a secret: the same as on the other nodes"


class _NoAnswer(Exception):
    """The endpoint does not answer at all: not a TLS problem."""


async def probe_tls(endpoint: str, options: ClientOptions) -> str:
    """Describe the TLS problem at `endpoint` and what to do; "" if none is found."""
    if endpoint.startswith("unix:"):
        return ""
    host, _, port = endpoint.rpartition(":")
    there = (host.strip("[]"), int(port))
    try:
        if options.secret is not None or options.tls:
            return await _with_tls(there, endpoint, options)
        return await _without_tls(there, endpoint)
    except (_NoAnswer, OSError):
        return ""


async def _without_tls(there: tuple[str, int], endpoint: str) -> str:
    answer = await _answer(there, None, "")
    if _is_http2(answer):
        return ""
    if answer.startswith(b"HTTP/"):
        return (
            f"{endpoint} serves HTTP/1, not gRPC: this may be the port of --http, or the port of another program. "
            "Use the port of --listen"
        )
    if await _speaks_tls(there):
        return (
            f"the service at {endpoint} uses TLS and this client does not: set {ENV}CA_FILE (for a "
            f"deployed service: the CA that signed its certificate) or {_GIVE_SECRET}"
        )
    if answer:
        return (
            f"another program listens at {endpoint}: it does not answer like a rendezvous service. "
            "Use another port on all nodes, or stop that program."
        )
    return ""


async def _with_tls(there: tuple[str, int], endpoint: str, options: ClientOptions) -> str:
    if words := file_problem(options.certificate_file, options.key_file, options.ca_file):
        return words
    try:
        answer = await _answer(there, _context(options), _expected_name(there[0], options))
    except ssl.SSLCertVerificationError as error:
        return _untrusted_text(endpoint, options, error)
    except (ssl.SSLError, ConnectionError):
        if await _speaks_tls(there):
            return _rejected_text(endpoint, options)
        if not await _speaks_plaintext(there):
            return ""
        asked = (
            f"{ENV}SECRET or {ENV}SECRET_FILE" if options.secret is not None else f"{ENV}CA_FILE or {ENV}TLS"
        )
        problem = f"the service at {endpoint} does not use TLS and this client does"
        return f"{problem}: unset {asked}, or start the service with --tls-cert"
    return "" if _is_http2(answer) else _rejected_text(endpoint, options)


def _untrusted_text(endpoint: str, options: ClientOptions, error: ssl.SSLCertVerificationError) -> str:
    if options.secret is not None:
        return f"the service at {endpoint} uses a different secret: give every node the same {_SECRET}"
    why = error.verify_message.rstrip(".")
    if "not yet valid" in why or "expired" in why:
        problem = f"cannot trust the certificate of the service at {endpoint}: {why}"
        return f"{problem}. Renew the certificate, or correct the clock of this machine."
    if "match" in why or "mismatch" in why:
        return (
            f"the certificate of the service at {endpoint} is for another name: {why}. Connect to that name, or set "
            f"{ENV}SERVER_NAME to it."
        )
    known = options.ca_file or "the system's CAs"
    return (
        f"cannot trust the certificate of the service at {endpoint}: {why}. It was not signed by {known}: "
        f"set {ENV}CA_FILE to the CA that signed it."
    )


def _rejected_text(endpoint: str, options: ClientOptions) -> str:
    if options.secret is not None:
        return (
            f"the service at {endpoint} rejected the secret of this node: give every node the same {_SECRET}"
        )
    if options.certificate_file:
        return (
            f"the service at {endpoint} rejected the client certificate {options.certificate_file}: check that it "
            "has not expired and that the CA of the service (--client-ca) signed it"
        )
    return f"the service at {endpoint} requires a client certificate: set {ENV}CERT_FILE and {ENV}KEY_FILE"


# --- trying ----------------------------------------------------------------------------------------------


async def _answer(there: tuple[str, int], context: ssl.SSLContext | None, name: str) -> bytes:
    """The first bytes of the answer; empty if the server closed it. Raises `_NoAnswer` and `ssl.SSLError`."""
    try:
        async with asyncio.timeout(_WITHIN_S):
            expected = name if context is not None else None
            reader, writer = await asyncio.open_connection(*there, ssl=context, server_hostname=expected)
    except TimeoutError:
        raise _NoAnswer from None
    try:
        writer.write(_HTTP2)
        async with asyncio.timeout(_ANSWER_S):
            return await reader.read(64)
    except TimeoutError:
        raise _NoAnswer from None
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
        return "ALERT" in (error.reason or "")  # a TLS server that rejects us
    except (ConnectionError, _NoAnswer):
        return False
    return True


async def _speaks_plaintext(there: tuple[str, int]) -> bool:
    try:
        return _is_http2(await _answer(there, None, ""))
    except _NoAnswer:
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
