"""The command `ddpctl replay`. `--help` imports this module, so it imports the rest late."""

from __future__ import annotations

import argparse

from rendezvous.control.formats import add_output, warn
from rendezvous.values.contracts import INVALID_USAGE
from rendezvous.values.error_codes import Code

HELP = "make the decisions of a journal again, or with other settings; needs no service"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="the journal: a file that ends in .ddpj")
    parser.add_argument(
        "--what-if",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="another setting of the job, such as lease=8, max-restarts=0 or spares=+1 (one node more that stands by); "
        "repeat the option for more",
    )
    parser.add_argument("--all", action="store_true", help="print the steps that decide nothing as well")
    add_output(parser)


def carry_out(arguments: argparse.Namespace) -> int:
    from ddp_launch_wings.replay.report import CannotReplay, JournalUnreadable, run

    try:
        return run(arguments)
    except (CannotReplay, JournalUnreadable) as error:
        warn(str(error), error.code)
    except OSError as error:
        if error.filename is None:  # of standard output
            raise
        warn(f"cannot read {error.filename}: {error.strerror}", Code.FILE_UNREADABLE)
    return INVALID_USAGE
