"""A driver library without a GPU, which plays faults: fake_nvml.c, compiled once for all tests of a process."""

from __future__ import annotations

import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

_SOURCE = Path(__file__).with_name("fake_nvml.c")


@cache
def library_folder() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="fake-nvml-")
    target = Path(folder.name, "libnvidia-ml.so.1")
    subprocess.run(["cc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", target, _SOURCE], check=True)
    return folder


class FakeDriver:
    """The driver of one machine. `play` says how its GPUs are from now on."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._plan = folder / "gpus.txt"
        self.library = os.path.join(library_folder().name, "libnvidia-ml.so.1")
        monkeypatch.setenv("FAKE_NVML", str(self._plan))
        self.play()

    def play(self, **how: object) -> None:
        """`gpu1_ecc=3` is written as "gpu1.ecc 3"."""
        lines = [f"{_key(name)} {value}\n" for name, value in how.items()]
        fresh = self._plan.with_suffix(".new")
        fresh.write_text("".join(lines))
        fresh.replace(self._plan)

    @property
    def environ(self) -> dict[str, str]:
        """For a program that opens the library by its name."""
        return {"FAKE_NVML": str(self._plan), "LD_LIBRARY_PATH": library_folder().name}


def _key(name: str) -> str:
    gpu, _, what = name.partition("_")
    if not (gpu.startswith("gpu") and gpu[3:].isdecimal()):
        return name
    link, _, more = what.partition("_")
    return f"{gpu}.{link}.{more}" if link.startswith("link") and link[4:].isdecimal() else f"{gpu}.{what}"
