"""Prints docs/options.md: how options are set. `make site` adds the table that `--help all` prints."""

from __future__ import annotations

from launcher.settings.options import GROUPS
from launcher.settings.values import Option, Reach

HEAD = """\
# Options

`ddp-launch --help` prints the common options, `ddp-launch --help all` every one with its default. In the documentation
site, this page has them as tables. They are made from `launcher/settings/options.py`.

You can set an option in three ways:

- with a flag: `--max-restarts 5/1h`
- with a variable, `DDP_LAUNCH_` and the long flag in capitals: `DDP_LAUNCH_MAX_RESTARTS=5/1h`. Options marked T are
  torchrun's, and also read its variable: `PET_MAX_RESTARTS`
- in the TOML file of `--config`: `max-restarts = "5/1h"`. The key is the long flag without the leading dashes. The keys
  `script` and `args` set the script and its arguments.

A flag overrides a variable, a variable overrides the file, and the file overrides the default. An empty variable counts
as unset. To see every value and its source, run `ddp-launch --print-config`.

TIME is a number of seconds or has a unit: `500ms`, `30s`, `5m`, `1h`.

`PYTHON_EXEC` sets the Python interpreter of the ranks, as it does for torchrun.
"""


def table(options: tuple[Option, ...]) -> str:
    rows = ["| option | default | T | |", "|---|---|---|---|"]
    for option in options:
        cells = (_names(option), _default(option), "T" if _is_of_torchrun(option) else "", _about(option))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def _names(option: Option) -> str:
    names = [option.short, *option.spellings] if option.short else [*option.spellings]
    return ", ".join(f"`{name}`" for name in names) + (f" `{option.metavar}`" if option.metavar else "")


def _default(option: Option) -> str:
    if option.is_switch:
        return "on" if option.default == "1" else ""
    return "" if option.default is None else f"`{option.default}`"


def _is_of_torchrun(option: Option) -> bool:
    return any(name.startswith("PET_") for name in option.variables)


def _about(option: Option) -> str:
    notes = [option.help]
    if option.without_effect:
        notes.append(f"no effect: {option.without_effect}")
    if option.foreign:
        notes.append(f"also `{option.foreign[0]}`")
    if option.reach is Reach.ENVIRONMENT:
        notes.append("not in a file")
    return "; ".join(notes)


def page() -> str:
    return "\n".join([HEAD, *(f"## {title}\n\n{table(options)}\n" for title, options in GROUPS)])


if __name__ == "__main__":
    print(HEAD, end="")
