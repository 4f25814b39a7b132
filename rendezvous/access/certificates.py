"""Check certificate and key files, since gRPC reports only that it could not use them."""

from __future__ import annotations

_CERTIFICATE, _KEY = b"CERTIFICATE-----", b"PRIVATE KEY-----"


def file_problem(certificate: str, key: str, authority: str) -> str:
    """Describe the problem with these files; "" if there is none. An empty path is not checked. Raises `OSError`."""
    for path, mark, kind in (
        (authority, _CERTIFICATE, "certificate"),
        (certificate, _CERTIFICATE, "certificate"),
        (key, _KEY, "private key"),
    ):
        if path and mark not in _read(path):
            return f"{path} does not contain a {kind} in PEM format"
    if certificate and key and not _belong_together(certificate, key):
        return (
            f"the key in {key} cannot be used with the certificate in {certificate}. Check that they belong together, "
            "that the key is not encrypted, and that neither file is damaged"
        )
    return ""


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _belong_together(certificate: str, key: str) -> bool:
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("ALL:@SECLEVEL=0")  # the strength of the keys is not checked here
    try:
        context.load_cert_chain(certificate, key, password="")  # without it, OpenSSL prompts at the terminal
    except ssl.SSLError:
        return False
    return True
