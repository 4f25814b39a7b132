"""Where a rank searches for modules, apart from the folder of its script."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def import_path(environ: Mapping[str, str]) -> list[str]:
    """`sys.path[1:]` of a rank that uses our interpreter. In our own process the folders of PYTHONPATH come last."""
    first = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return [*first, *(entry for entry in sys.path if entry not in first)]
