"""The program of a rank of `ddp.launch`: `python -m ddp.launching.rank NAME`. DDP_CALL_FOLDER has the function."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from types import TracebackType

from ddp.launching import parcels
from ddp.telemetry.contracts import CALL_FOLDER, GENERATION


def _print_with_lines(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """From the function on, and also with lines of code that has no file, as that of a notebook."""
    while trace is not None and trace.tb_next is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    # In one piece: what is read when the rank has just ended has all of it or nothing.
    sys.stderr.write("".join(traceback.format_exception(kind, error, trace)))
    sys.stderr.flush()


def _is_ours(file: str) -> bool:
    return file in (__file__, "<frozen runpy>") or file.endswith("/runpy.py")


def main() -> None:
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_with_lines
    folder = Path(os.environ[CALL_FOLDER])
    function, args, kwargs = parcels.call_in(folder)
    result = function(*args, **kwargs)
    # After a heal in place, the generation and the rank are not those of the start.
    generation, rank = int(os.environ[GENERATION]), int(os.environ["RANK"])
    parcels.write_result(folder, generation, rank, result)


if __name__ == "__main__":
    main()
