"""Makes a rank dump its stacks on request: at a signal, the Python stacks of all its threads go into anonymous memory.

The interpreter's own faulthandler writes them, whatever the rank does: in a loop of native code, in a lock, in a system
call. The signal is a real-time one, which neither torch nor NCCL nor schedulers use. The descriptor is far above those
that scripts get. Worker processes that the rank forks inherit both. The agent reads the memory through /proc, so no
file is left behind.
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
        faulthandler.register(SIGNAL, file=memory, all_threads=True)
    except (OSError, ValueError, RuntimeError):  # a low limit on open files, or no faulthandler
        pass
    finally:
        os.close(near)
