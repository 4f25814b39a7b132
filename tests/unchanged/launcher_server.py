"""torchrun, or ddp-launch, a thousand times for one import: forks, and runs the launcher's own `main` in the child.

What torchrun found to have failed first goes into a file, as torchrun's own exception tells it. Ranks are started by
the launcher as ever: by a new interpreter.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

Order = dict[str, Any]


def serve(run: Callable[[Order], int]) -> None:
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            order = json.loads(line)
            _enter(order)
            os._exit(_code(run, order))
        print(json.dumps(pid), flush=True)
        print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])), flush=True)


def _enter(order: Order) -> None:
    os.setsid()
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        flags = os.O_RDONLY if fd == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND
        opened = os.open(order[name], flags, 0o666)
        os.dup2(opened, fd)
        os.close(opened)
    sys.argv = order["words"]
    sys.stdout, sys.stderr = (_unbuffered(fd) for fd in (1, 2))


def _unbuffered(fd: int) -> io.TextIOWrapper:
    """Several threads of torchrun write to one stream; with a buffer, they mix up its memory (CPython 3.11)."""
    return io.TextIOWrapper(io.FileIO(fd, "w", closefd=False), errors="backslashreplace", write_through=True)


def _code(run: Callable[[Order], int], order: Order) -> int:
    code = 1
    try:
        code = run(order)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:  # the traceback that the launcher would print
        with contextlib.suppress(OSError), open(order["report"], "w") as file:
            json.dump(repr(error), file)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _torchrun() -> Callable[[Order], int]:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    def run(order: Order) -> int:
        try:
            main()
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            with open(order["report"], "w") as file:
                json.dump([rank, failure.exitcode], file)
            return 1
        except SignalException as error:
            with open(order["report"], "w") as file:
                json.dump(int(error.sigval), file)
            return 1
        return 0

    return run


def _ddp_launch() -> Callable[[Order], int]:
    import launcher.agent
    import launcher.start  # noqa: F401  # what a launch imports
    from _ddp_launch_entry import ddp_launch

    return lambda _order: ddp_launch()


if __name__ == "__main__":
    serve({"torchrun": _torchrun, "ddp-launch": _ddp_launch}[sys.argv[1]]())
