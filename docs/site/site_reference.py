"""Writes the pages that are made from the code into a folder, for `make site`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path += [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import code_pages
import module_page
import options
from command_pages import ddp_rendezvous, ddpctl

PAGES = {
    "options.md": options.page,  # in place of the short one in docs/
    "reference/ddp-rendezvous.md": ddp_rendezvous,
    "reference/ddpctl.md": ddpctl,
    "reference/python-api.md": code_pages.python_api,
    "reference/environment.md": code_pages.environment,
    "reference/metrics.md": code_pages.metric_names,
    "reference/events.md": code_pages.events,
    "reference/messages.md": code_pages.messages,
    "reference/protocol.md": code_pages.protocol,
    "reference/modules.md": module_page.modules,
}


def write(folder: Path) -> None:
    for name, page in PAGES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page())


if __name__ == "__main__":
    write(Path(sys.argv[1]))
