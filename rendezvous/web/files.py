"""The files of the page, as they lie in this package."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class File:
    data: bytes
    media_type: str
    tag: str


def read_files() -> dict[str, File]:
    """By their path in the URL. Nothing else is served, whatever a URL says."""
    root = Path(__file__).parent / "static"
    found = (path for path in sorted(root.rglob("*")) if path.suffix in _TYPES)
    return {path.relative_to(root).as_posix(): _file(path) for path in found}


def _file(path: Path) -> File:
    data = path.read_bytes()
    return File(data, _TYPES[path.suffix], f'"{hashlib.sha256(data).hexdigest()[:16]}"')
