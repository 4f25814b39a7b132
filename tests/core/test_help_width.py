"""The help of ddp-rendezvous, ddpctl and all their commands fits a terminal of 80 columns."""

import argparse
import re
from collections.abc import Iterator

import pytest

from rendezvous import main as service
from rendezvous.control import commands as control


def parsers(top: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield top
    for action in top._actions:
        if isinstance(action.choices, dict):
            yield from action.choices.values()


@pytest.mark.parametrize("top", [service.command_line, control.parser])
def test_help_fits_80_columns_and_names_values(top, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = list(parsers(top()))
    assert len(found) > 5
    for parser in found:
        text = parser.format_help()
        assert max(map(len, text.splitlines())) <= 80, text
        for action in parser._actions:
            if action.option_strings and action.nargs != 0:
                assert action.metavar or action.choices, f"{action.option_strings}: name its value"
    assert len(re.findall(r"^  \S", found[0].format_help().partition("examples:")[2], re.MULTILINE)) >= 3
