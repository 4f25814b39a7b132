"""The release of this installation, and how two releases that cannot understand each other are reported.

A client sends its version with each call, and a refused call is answered with that of the service. No decision uses
them: agents of one job compare the `version` of their `JobSpec`, and on the wire fields are only ever added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

VERSION = "0.2.0.dev0"
VERSION_METADATA = "ddp-launch-version"
_MOST_CHARS = 40
_KEPT = frozenset("0123456789.abcdefghijklmnopqrstuvwxyz+-")


def version_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The version of the other end; "" if it did not send one."""
    sent = next((str(value) for key, value in metadata or () if key == VERSION_METADATA), "")
    return "".join(char for char in sent if char in _KEPT)[:_MOST_CHARS]


def with_releases(words: str, service: str, client: str) -> str:
    """Add to the words of a refusal that the two ends are of different releases, and what to do."""
    if service == client:
        return words
    return (
        f"{words} (the service has {_release(service)}, the client has {_release(client)}: "
        "install the same release on both, on the service first)"
    )


def _release(version: str) -> str:
    return f"ddp-launch {version}" if version else "an unknown release of ddp-launch"
