"""Finds the programs that read the stacks of a rank from outside: on PATH, and beside the interpreter of the launcher.

`pip install "ddp-launch[stacks]"` puts py-spy there. The folder is not on PATH where an environment is used without
being activated, as by `/opt/train/bin/ddp-launch`.
"""

from __future__ import annotations

import os
import shutil
import sys


def find(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=os.path.dirname(sys.executable))
