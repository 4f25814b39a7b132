"""Makes a rank dump its stacks on request: a thread that gets a signal writes its Python stack into anonymous memory.

The interpreter's own faulthandler writes it, whatever the thread does: in a loop of native code, in a lock, in a system
call. It writes the stack of that thread only. The frames of another thread may change while they are read, and then the
process crashes. The signal is a real-time one, which neither torch nor NCCL nor schedulers use. The descriptor is far
above those that scripts get. Worker processes that the rank forks inherit both. The agent reads and empties the memory
through /proc (launcher/health/stacks.py), so no file is left behind.
"""

from __future__ import annotations

import os

SIGNAL = 62
MEMORY = "ddp-stacks"
_FAR = 512


def listen() -> None:
    import faulthandler
    import fcntl

    try:
        near = os.memfd_create(MEMORY)
    except (OSError, AttributeError):
        return
    try:
        memory = fcntl.fcntl(near, fcntl.F_DUPFD_CLOEXEC, _FAR)
        fcntl.fcntl(memory, fcntl.F_SETFL, os.O_APPEND)
        faulthandler.register(SIGNAL, file=memory, all_threads=False)
    except (OSError, ValueError, RuntimeError):  # a low limit on open files, or no faulthandler
        pass
    finally:
        os.close(near)
