"""Parse options whose value is a list of names: environment variables, modules."""

from __future__ import annotations

import re

from launcher.settings.values import BadValue, quote


def variables(value: str) -> tuple[str, ...]:
    """Parse environment variables, each NAME, NAME* or NAME=VALUE; ',,' stands for a comma."""
    found = tuple(part.replace("\0", ",").strip() for part in value.replace(",,", "\0").split(","))
    for each in found:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*(\*|=.*)?", each, re.DOTALL):
            raise BadValue(
                f"invalid variable name {quote(each)}",
                "NAME[=VALUE][,...]",
                "WANDB_API_KEY,MODE=fast",
            )
    return found


def modules(value: str) -> tuple[str, ...]:
    found = tuple(part.strip() for part in value.split(","))
    for each in found:
        if not all(part.isidentifier() for part in each.split(".")):
            raise BadValue(f"invalid module name {quote(each)}", "MODULE[,...]", "torch._dynamo,transformers")
    return found
