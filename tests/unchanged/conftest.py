"""Folders for programs that run under both launchers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name, because multiprocessing makes sockets below it: the path of one has 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="unchanged-") as name:
        yield Path(name)
