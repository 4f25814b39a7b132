"""The images that manifests name, and what is said of each in its Dockerfile."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_DOCKERFILES = {
    "ddp-rendezvous": "service.Dockerfile",
    "ddp-train": "training.Dockerfile",
}  # etcd's is others'


def name_of(image: str) -> str:
    """Without registry, tag and digest."""
    return re.sub(r"[:@].*", "", image.rpartition("/")[2])


@dataclass(frozen=True)
class Image:
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    folder: str = "/"


def image(name: str) -> Image:
    if name not in _DOCKERFILES:
        return Image()
    text = (ROOT / "deploy" / "docker" / _DOCKERFILES[name]).read_text().rpartition("\nFROM ")[2]
    said = dict(re.findall(r"^(ENTRYPOINT|CMD|WORKDIR) (.*)$", text, re.MULTILINE))
    entrypoint, command = (tuple(json.loads(said.get(word, "[]"))) for word in ("ENTRYPOINT", "CMD"))
    return Image(entrypoint, command, said.get("WORKDIR", "/"))
