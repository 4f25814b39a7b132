"""`python -m ddp.elastic`: look at commits on disk or in an object store."""

from __future__ import annotations

import sys

from _ddp_launch_entry import LIBRARY, find

if __name__ == "__main__":
    sys.exit(find(LIBRARY, "ddp.elastic.__main__")())
