"""Writes the pages that are made from the code into a folder, for `make site`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.extend(
    str(Path(__file__).resolve().parents[2] / name) for name in ("docs/site", "docs", "bench/faults")
)

import code_pages
import fault_table
import module_page
import options
import suite
from command_pages import ddp_rendezvous, ddpctl

PAGES = {
    "options.md": options.page,  # in place of the short one in docs/
    "reference/ddp-rendezvous.md": ddp_rendezvous,
    "reference/ddpctl.md": ddpctl,
    "reference/python-api.md": code_pages.python_api,
    "reference/environment.md": code_pages.environment,
    "reference/metrics.md": code_pages.metric_names,
    "reference/events.md": code_pages.events,
    "reference/faults.md": lambda: fault_table.all_rows(fault_table.load()[0], suite.CASES),
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
