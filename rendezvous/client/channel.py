"""gRPC channels to the service, for agents and for ddpctl."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from rendezvous.access.secret import NAME
from rendezvous.client.options import ENV, OptionsUnusable, current_token, is_loopback
from rendezvous.client.session_rules import CONNECT_S, PATIENCE_S, PING_AFTER_S
from rendezvous.values.version import VERSION, VERSION_METADATA

if TYPE_CHECKING:
    from rendezvous.client.options import ClientOptions

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
