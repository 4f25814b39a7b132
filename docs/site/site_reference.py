"""Writes the pages that are made from the code into a folder, for `make site`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))

from command_pages import ddp_rendezvous, ddpctl

PAGES = {
    "reference/ddp-rendezvous.md": ddp_rendezvous,
    "reference/ddpctl.md": ddpctl,
}


def write(folder: Path) -> None:
    for name, page in PAGES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page())


if __name__ == "__main__":
    write(Path(sys.argv[1]))
