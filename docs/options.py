"""Prints docs/options.md, made from the table of options: `make options`."""

from __future__ import annotations

from launcher.settings.option import Option, Reach
from launcher.settings.options import GROUPS

HEAD = """\
# Options

Made from the table in `launcher/settings/options.py` by `make options`; `ddp-launch --help` says the same.

An option may be given as a flag, as a variable, or in the TOML file that `--config` names, where its key is the long
flag without dashes in front (`max-restarts = "5/1h"`; `script` and `args` name the script). A flag wins over a
variable, a variable over the file, the file over the default. An empty variable counts as unset. TIME is in seconds
or has a unit: `500ms`, `30s`, `5m`, `1h`. `--print-config` shows every value and where it came from.

`PYTHON_EXEC` names the interpreter of the ranks, as it does for torchrun.
"""


def table(options: tuple[Option, ...]) -> str:
    rows = ["| option | default | variables | |", "|---|---|---|---|"]
    for option in options:
        cells = (_names(option), _default(option), _variables(option), _about(option))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def _names(option: Option) -> str:
    names = [option.short, *option.spellings] if option.short else [*option.spellings]
    return ", ".join(f"`{name}`" for name in names) + (f" `{option.metavar}`" if option.metavar else "")


def _default(option: Option) -> str:
    if option.is_switch:
        return "on" if option.default == "1" else ""
    return "" if option.default is None else f"`{option.default}`"


def _variables(option: Option) -> str:
    names = list(option.variables)
    if option.foreign:
        names.append(option.foreign[0])
    text = ", ".join(f"`{name}`" for name in names)
    return text + ("; not in the file" if option.reach is Reach.ENVIRONMENT else "")


def _about(option: Option) -> str:
    return f"{option.help}; ignored: {option.without_effect}" if option.without_effect else option.help


def page() -> str:
    return "\n".join([HEAD, *(f"## {title}\n\n{table(options)}\n" for title, options in GROUPS)])


if __name__ == "__main__":
    print(page(), end="")
