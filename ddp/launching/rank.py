"""The program of a rank of `ddp.launch`: `python -m ddp.launching.rank FOLDER`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ddp.launching import parcels


def main() -> None:
    folder = Path(sys.argv[1])
    function, args, kwargs = parcels.call_in(folder)
    result = function(*args, **kwargs)
    # After a heal in place, the generation and the rank are not those of the start.
    generation, rank = int(os.environ["DDP_GENERATION"]), int(os.environ["RANK"])
    parcels.write_result(folder, generation, rank, result)


if __name__ == "__main__":
    main()
