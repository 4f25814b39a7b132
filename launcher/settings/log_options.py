"""Options of logs and the terminal, a part of the table in launcher/settings/options.py."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from launcher.settings import values
from launcher.settings.option import Option
from launcher.settings.option import ours as _ours
from launcher.settings.option import switch as _switch
from launcher.settings.option import torch as _torch

if TYPE_CHECKING:
    from typing import Literal


_MOST_MIB = 1 << 20


def bars(value: str) -> Literal["first", "all", "none"] | tuple[int, ...]:
    match value:
        case "first" | "all" | "none":
            return value
        case _:
            return values.numbers(value, "local ranks", values.MAX_RANKS_PER_NODE)


LOGS = (
    _torch(
        "--log-dir",
        "DIR",
        None,
        values.path,
        "keep the logs of the ranks in this directory, in one folder per run",
    ),
    _torch(
        "--redirects",
        "STREAMS",
        "0",
        values.streams,
        "write these streams to the log file only: 0 none, 1 stdout, 2 stderr, 3 both; per local rank: 0:3,1:2",
        short="-r",
    ),
    _torch(
        "--tee",
        "STREAMS",
        "0",
        values.streams,
        "write these streams to the log file and the terminal; same values as -r",
        short="-t",
    ),
    _torch(
        "--local-ranks-filter",
        "N[,...]",
        None,
        partial(values.numbers, what="local ranks", below=values.MAX_RANKS_PER_NODE),
        "show only the output of these local ranks on the terminal",
    ),
    _torch(
        "--duplicate-stdout-filters",
        "TEXT[,...]",
        None,
        values.filters,
        "also copy stdout lines that contain one of these texts to a separate file; write ',,' for a comma",
    ),
    _torch(
        "--duplicate-stderr-filters",
        "TEXT[,...]",
        None,
        values.filters,
        "same for stderr lines",
    ),
    Option(
        "--log-prefix",
        "prefix of each line; fields: {node} {rank} {local_rank} {role} {generation} (number of the attempt, which "
        "increases at each restart)",
        values.prefix,
        "TEMPLATE",
        "[{node}:{rank}] ",
        foreign=("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", values.prefix_from_torch),
    ),
    _ours(
        "--color",
        "WHEN",
        "auto",
        values.choice("auto", "always", "never"),
        "when to use color: auto (on a terminal, unless NO_COLOR is set), always, never",
    ),
    _ours(
        "--progress",
        "WHEN",
        "auto",
        values.choice("auto", "always", "never"),
        "when to show the progress line at the bottom: auto (on a terminal), always, never",
    ),
    _ours(
        "--terminal",
        "WHEN",
        "auto",
        values.choice("auto", "never"),
        "when ranks get a terminal, so that libraries show progress bars and colors: auto (for output that is shown on "
        "a terminal), never",
    ),
    _ours(
        "--bars",
        "first|all|none|N[,...]",
        "first",
        bars,
        "local ranks whose progress bars are redrawn at the bottom of a terminal; first: the lowest local rank that "
        "is shown",
    ),
    _switch(
        "--journal",
        "keep a journal of what the agent and its service were given, in the folder of the logs, for `ddpctl replay`",
        default="1",
        negatable=True,
    ),
    _ours(
        "--journal-limit",
        "MIB",
        "8",
        partial(values.count, least=1, most=_MOST_MIB),
        "size at which a journal begins a new file; the file before is kept",
    ),
)
