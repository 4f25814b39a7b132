"""docs/security.md explains every counted reason."""

from __future__ import annotations

import re

from tidy import ROOT

from rendezvous.access.auth import Reason

PAGE = (ROOT / "docs" / "security.md").read_text()


def test_every_reason_is_explained() -> None:
    told = {
        word for line in PAGE.splitlines() if line.startswith("| `") for word in re.findall(r"`(\w+)`", line)
    }
    assert {reason.value for reason in Reason} <= told
