"""How the command has ended, for the program that started it (`ddp.launch`), in the file that DDP_ENDING_FILE names."""

from __future__ import annotations

import os
from collections.abc import Mapping

from launcher.template.contracts import ENDING_FILE


def leave(exit_code: int, reason: str, code: str | None, failure: Mapping[str, object] | None = None) -> None:
    path = os.environ.get(ENDING_FILE)
    if not path:
        return
    import json

    text = json.dumps({"exit_code": exit_code, "reason": reason, "code": code, "failure": failure})
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        pass  # its reader is gone; the exit code remains
