"""A parser of command lines whose errors end with a code."""

from __future__ import annotations

import argparse
from typing import NoReturn

from rendezvous.values.error_codes import Code, with_code


class CodedParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(with_code(message, Code.INVALID_COMMAND_LINE))
