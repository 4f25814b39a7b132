"""`python -m ddp.elastic`: look at commits on disk or in an object store."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ddp.telemetry.coded import CodedError

if TYPE_CHECKING:
    from ddp.elastic.files.folders import Folder
    from ddp_launch_wings.inspection.commit_list import Listed

_PATIENCE_S = 20.0  # with a store that does not answer
_FOLDER = "folder of the commits, as in State(folder=...): a path or a URL such as s3://bucket/run"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m ddp.elastic", description="Look at the commits of ddp.elastic.State."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (
        ("ls", "list the commits, with their size and whether they are complete"),
        ("verify", "read all bytes of the commits and compare checksums; exit code 1 if anything is damaged"),
    ):
        command = commands.add_parser(name, help=what, description=what)
        command.add_argument("folder", help=f"{_FOLDER}; or one commit in it")
    what = "write the tensors of a commit, or of another checkpoint of torch, to a file in the format safetensors"
    command = commands.add_parser("export", help=what, description=what)
    command.add_argument(
        "source", help=f"one commit, or the {_FOLDER}; then the newest complete commit is used"
    )
    command.add_argument("target", type=Path, help="the file to write")
    command.add_argument(
        "--name",
        default="",
        help="only the tensors of this object of the State, under its own names: --name model",
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        if options.command == "export":
            from ddp_launch_wings.inspection import (
                saved_commits,
            )  # it needs torch; the list and the help do not

            n_tensors = saved_commits.export(options.source, options.target, options.name, _PATIENCE_S)
            sys.stdout.write(f"wrote {n_tensors} tensors to {options.target}\n")
            return 0
        return _look(options.folder, verifies=options.command == "verify")
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
        code = "" if isinstance(error, CodedError) else " [DDP-8001]"
        sys.stderr.write(f"python -m ddp.elastic: {error}{code}\n")
        return 2


def _look(name: str, verifies: bool) -> int:
    from ddp_launch_wings.inspection import commit_list

    (folder, found), code = commit_list.listed_at(name, _PATIENCE_S), 0
    if not found:
        scopes = ", ".join(commit_list.scopes_in(folder))
        hint = f", but in its folders {scopes}: name one of them" if scopes else ""
        text = f"{name}: there are no commits{hint}\n"
        if verifies:  # otherwise a wrong name would look like a good result
            raise FileNotFoundError(text.rstrip())
        sys.stdout.write(text)
    for one in found:
        wrong = _problems(folder, one) if verifies else []
        state = one.state if not verifies else "damaged" if wrong else "ok"
        size = f"{sum(one.files.values()) / 1e6:.1f} MB"
        sys.stdout.write(
            f"{one.commit.number:>10}  {one.commit.lineage}  {one.parts:>4} parts  {size:>12}  {state}\n"
        )
        for text in wrong:
            code = 1
            sys.stdout.write(f"{'':>10}  {text}\n")
    return code


def _problems(folder: Folder, one: Listed) -> list[str]:
    from ddp_launch_wings.inspection import saved_commits

    return list(saved_commits.problems(folder, one))
