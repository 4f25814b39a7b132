"""The program of a rank of `ddp.launch`: `python -m ddp.launching.rank NAME`. DDP_CALL_FOLDER has the function."""

from __future__ import annotations

import os
from pathlib import Path

from ddp.launching import parcels
from ddp.telemetry.contracts import CALL_FOLDER, GENERATION


def main() -> None:
    folder = Path(os.environ[CALL_FOLDER])
    function, args, kwargs = parcels.call_in(folder)
    result = function(*args, **kwargs)
    # After a heal in place, the generation and the rank are not those of the start.
    generation, rank = int(os.environ[GENERATION]), int(os.environ["RANK"])
    parcels.write_result(folder, generation, rank, result)


if __name__ == "__main__":
    main()
