"""torchrun, a thousand times for one import of torch: forks, and runs torchrun's own `main` in the child.

What torchrun found to have failed first goes into a file, as torchrun's own exception tells it. Ranks are started by
torchrun as ever: they are new interpreters.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main


def serve() -> None:
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os._exit(_run(json.loads(line)))
        print(json.dumps(pid), flush=True)
        print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])), flush=True)


def _unbuffered(fd: int) -> io.TextIOWrapper:
    """Several threads of torchrun write to one stream; with a buffer, they mix up its memory (CPython 3.11)."""
    return io.TextIOWrapper(io.FileIO(fd, "w", closefd=False), errors="backslashreplace", write_through=True)


def _run(order: dict[str, Any]) -> int:
    os.setsid()
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        flags = os.O_RDONLY if fd == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND
        opened = os.open(order[name], flags, 0o666)
        os.dup2(opened, fd)
        os.close(opened)
    sys.argv = ["torchrun", *order["words"]]
    sys.stdout, sys.stderr = (_unbuffered(fd) for fd in (1, 2))
    code = 1
    try:
        main()
        code = 0
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        with open(order["report"], "w") as file:
            json.dump([rank, failure.exitcode], file)
    except SignalException as error:
        with open(order["report"], "w") as file:
            json.dump(int(error.sigval), file)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:  # the traceback that torchrun would print
        with contextlib.suppress(OSError), open(order["report"], "w") as file:
            json.dump(repr(error), file)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    serve()
