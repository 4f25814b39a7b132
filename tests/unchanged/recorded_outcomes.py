"""What torchrun makes of the programs of `make test`, recorded for one version of torch and Python.

`make record` writes the file. A program that has changed since, or a version without a file, is asked on the spot.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

from outcomes import Outcome, Torchrun
from random_programs import Program, program

_PYTHON = "{}.{}".format(*sys.version_info)
FILE = (
    Path(__file__).parent / "recorded" / f"torch-{version('torch').partition('+')[0]}-python-{_PYTHON}.json"
)
# Most do without torch, whose import costs more than all the rest of a program.
_LIGHT = range(30)
PROGRAMS = [program(seed, torch=False) for seed in _LIGHT] + [program(seed, torch=True) for seed in (3, 7)]


def key(one: Program) -> str:
    return f"{one.seed} {one.digest}"


def recorded() -> dict[str, Outcome]:
    found = json.loads(FILE.read_text()) if FILE.exists() else {}
    return {name: Outcome(**fields) for name, fields in found.items()}


def record(folder: Path) -> None:
    server = Torchrun()
    found = {key(one): server.run(one, folder / "torchrun").to_json() for one in PROGRAMS}
    server.close()
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
