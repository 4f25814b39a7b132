"""Parse options whose value is a list of names: environment variables, modules, units of the network."""

from __future__ import annotations

import re

from launcher.settings.values import BadValue, quote

_MOST_UNITS = 8  # of a place in the network


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


def place(value: str) -> str:
    """Parse a path of names, such as pod1/rack7; a single word may also name a source."""
    form = ("names separated by /, at most 8 of them", "pod1/rack7")
    parts = value.strip().strip("/").split("/")
    if len(parts) > _MOST_UNITS or not all(re.fullmatch(r"[A-Za-z0-9_.:-]{1,24}", part) for part in parts):
        raise BadValue("not a place in the network", *form)
    return "/".join(parts)
