"""The options of ddpctl and ddp-rendezvous, from their parsers; those of ddp-launch are docs/options.md."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rendezvous.control.commands import parser as ddpctl_parser
from rendezvous.main import command_line

if TYPE_CHECKING:
    from collections.abc import Iterator


def ddpctl() -> str:
    return page(ddpctl_parser(), "What the commands do, with examples: [look at jobs](../ddpctl.md).")


def ddp_rendezvous() -> str:
    return page(command_line(), "How the service works: [the rendezvous](../rendezvous.md).")


def page(parser: argparse.ArgumentParser, see: str) -> str:
    parts = [f"# Options of {parser.prog}", parser.description or "", see, table(own(parser))]
    for command, help_text, below in commands(parser):
        shared = {each.dest for each in own(parser)}  # said once, above
        mine = [each for each in own(below) if each.dest not in shared]
        parts += [f"## {parser.prog} {command}", sentence(help_text), table(mine)]
    return "\n\n".join(part for part in parts if part) + "\n"


def commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """Once each, under their first names."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            help_of = {each.dest.split(" ")[0]: each.help or "" for each in action._choices_actions}
            for name, below in action.choices.items():
                if name in help_of:
                    yield name, help_of[name], below


def own(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    left_out = (argparse._SubParsersAction, argparse._HelpAction)
    shown = (each for each in parser._actions if not isinstance(each, left_out))
    return [each for each in shown if each.help is not argparse.SUPPRESS]


def table(actions: list[argparse.Action]) -> str:
    if not actions:
        return ""
    rows = ["| argument | default | |", "|---|---|---|"]
    for action in actions:
        cells = (spelling(action), default(action), about(action))
        rows.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(rows)


def spelling(action: argparse.Action) -> str:
    metavar = action.metavar or (
        "" if action.choices is None else "{" + ",".join(map(str, action.choices)) + "}"
    )
    value = metavar if isinstance(metavar, str) else " ".join(metavar)
    if not action.option_strings:
        return f"`{value or action.dest.upper()}`"
    names = ", ".join(f"`{each}`" for each in action.option_strings)
    takes_none = action.nargs == 0
    return names if takes_none else f"{names} `{value or action.dest.upper()}`"


def default(action: argparse.Action) -> str:
    if action.default in (None, False, argparse.SUPPRESS, "", []) or action.nargs == 0:
        return ""
    return f"`{action.default}`"


def about(action: argparse.Action) -> str:
    words = vars(action) | {"prog": "", "default": action.default}
    return (action.help or "") % words


def sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""
