"""What the launcher and the ranks agree on: the names of ddp/telemetry/contracts.py, without an import of `ddp`.

A script, or another package in the environment, may use the name `ddp` for something else. So the file is read by its
path. The zygote imports this module under the name of its own package.
"""

from __future__ import annotations

import os
from importlib.machinery import SourceFileLoader
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddp.telemetry.contracts import *  # noqa: F403
else:
    _NAME = "_ddp_launch_contracts"
    _FILE = os.path.normpath(os.path.join(os.path.abspath(__file__), "../../../ddp/telemetry/contracts.py"))
    exec(SourceFileLoader(_NAME, _FILE).get_code(_NAME), globals())
