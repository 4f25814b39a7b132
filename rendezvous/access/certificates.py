"""What is wrong with files of certificates and keys: gRPC says no more than that nothing came of them."""

from __future__ import annotations

_CERTIFICATE, _KEY = b"CERTIFICATE-----", b"PRIVATE KEY-----"


def fault(certificate: str, key: str, authority: str) -> str:
    """In words; "" where all is well. A path that is "" is not looked at. Raises `OSError`."""
    for path, mark, kind in (
        (authority, _CERTIFICATE, "certificate"),
        (certificate, _CERTIFICATE, "certificate"),
        (key, _KEY, "private key"),
    ):
        if path and mark not in _read(path):
            return f"{path} holds no {kind} (PEM)"
    if certificate and key and not _belong_together(certificate, key):
        return f"the key in {key} is not that of the certificate in {certificate}, or is encrypted, or one is damaged"
    return ""


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _belong_together(certificate: str, key: str) -> bool:
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("ALL:@SECLEVEL=0")  # how strong they are is for the two sides to agree on
    try:
        context.load_cert_chain(certificate, key, password="")  # or it would ask at the terminal
    except ssl.SSLError:
        return False
    return True
