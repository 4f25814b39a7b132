"""Read a client's credentials and trusted CAs from DDP_RENDEZVOUS_* variables and the files that these name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from rendezvous.access.secret import Secret, SecretUnusable, parse, read
from rendezvous.values.error_codes import Code, Coded
from rendezvous.values.late_dataclass import dataclass


class OptionsUnusable(Coded, ValueError):
    """An option is invalid. The message is for the user who set it."""

    code = Code.CLIENT_SETTINGS_INVALID


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """How to connect. `token`, `secret` and the key file are secret: they never come from the command line."""

    token: str = ""
    token_file: str = ""  # read again for each stream, so a token can be renewed while the job runs
    tls: bool = False
    ca_file: str = ""  # empty: the system's
    certificate_file: str = ""
    key_file: str = ""
    server_name: str = ""  # the name in the service's certificate, if it is not the host of the endpoint
    secret: Secret | None = field(default=None, repr=False)  # of the job; replaces all of the above
    insecure: bool = False  # permit a token on a connection without TLS
    give_up_s: float = 600.0  # if no service was ever reached

    def __repr__(self) -> str:
        secret = "***" if self.token else ""
        return f"ClientOptions(token={secret!r}, tls={self.tls}, ca_file={self.ca_file!r})"


ENV = "DDP_RENDEZVOUS_"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def client_options(environ: Mapping[str, str], give_up_s: float = 600.0) -> ClientOptions:
    """Raises `OptionsUnusable`."""
    ca_file = environ.get(f"{ENV}CA_FILE", "")
    certificate_file, key_file = environ.get(f"{ENV}CERT_FILE", ""), environ.get(f"{ENV}KEY_FILE", "")
    if bool(certificate_file) != bool(key_file):
        raise OptionsUnusable(f"{ENV}CERT_FILE and {ENV}KEY_FILE must be set together: set both or neither")
    shared = job_secret(environ)
    if shared and (ca_file or certificate_file):
        raise OptionsUnusable(
            f"{ENV}SECRET_FILE conflicts with {ENV}CA_FILE and {ENV}CERT_FILE. Use the secret if an agent runs the "
            "rendezvous, or the certificates if you connect to a deployed service."
        )
    return ClientOptions(
        token=_token(environ),
        secret=shared,
        token_file=environ.get(f"{ENV}TOKEN_FILE", ""),
        tls=_flag(environ, "TLS", bool(ca_file or certificate_file)),
        ca_file=ca_file,
        certificate_file=certificate_file,
        key_file=key_file,
        server_name=environ.get(f"{ENV}SERVER_NAME", ""),
        insecure=_flag(environ, "INSECURE", False),
        give_up_s=give_up_s,
    )


def _flag(environ: Mapping[str, str], name: str, otherwise: bool) -> bool:
    """Read a flag. Any value except true and false is an error: a misspelt value must not turn protection off."""
    text = environ.get(f"{ENV}{name}", "").strip().lower()
    if text and text not in (*_TRUE, *_FALSE):
        raise OptionsUnusable(f"invalid {ENV}{name} {text!r}: use true or false")
    return text in _TRUE if text else otherwise


def _token(environ: Mapping[str, str]) -> str:
    path = environ.get(f"{ENV}TOKEN_FILE", "")
    if not path:
        return _one_line(environ.get(f"{ENV}TOKEN", ""), f"{ENV}TOKEN")
    return _token_in(path)


def current_token(options: ClientOptions) -> str:
    """Read the token from its file. While the file is being replaced, return the previous token."""
    if not options.token_file:
        return options.token
    try:
        return _token_in(options.token_file)
    except OptionsUnusable:
        return options.token


def _token_in(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return _one_line(file.read(8192), path)
    except (OSError, UnicodeDecodeError) as error:
        raise OptionsUnusable(f"cannot read the token in {path}: {error}. Check {ENV}TOKEN_FILE") from error


def _one_line(text: str, where: str) -> str:
    """Check the token: gRPC would report an invalid one as a broken connection, and the client would retry."""
    token = text.strip()
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise OptionsUnusable(
            f"invalid token in {where}: a token is one line of printable ASCII; `ddp-rendezvous token` creates one"
        )
    return token


def job_secret(environ: Mapping[str, str]) -> Secret | None:
    """Raises `OptionsUnusable`."""
    try:
        if path := environ.get(f"{ENV}SECRET_FILE", ""):
            return read(path)
        text = environ.get(f"{ENV}SECRET", "")
        return parse(text, f"{ENV}SECRET") if text else None
    except SecretUnusable as error:
        raise OptionsUnusable(str(error), code=error.code) from None


def is_loopback(endpoint: str) -> bool:
    import ipaddress  # takes as long as the rest of this module

    if endpoint.startswith("unix:"):
        return True
    host = endpoint.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
