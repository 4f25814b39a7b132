"""A job of torchft on this host: its lighthouse, and each rank as a replica group with a torchrun of its own.

python bench/meet/replicas.py REPLICAS SCRIPT [ARGUMENT ...]
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys


def main() -> int:
    replicas, script = int(sys.argv[1]), sys.argv[2:]
    beside = os.path.dirname(sys.executable)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    bind = ["--bind", f"[::]:{port}", "--min_replicas", "1", "--join_timeout_ms", "10000"]
    subprocess.Popen([os.path.join(beside, "torchft_lighthouse"), *bind])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    started = []
    for replica in range(replicas):
        numbers = {"REPLICA": str(replica), "REPLICAS": str(replicas)}
        env = {**os.environ, "TORCHFT_LIGHTHOUSE": f"http://localhost:{port}", **numbers}
        started.append(subprocess.Popen([*torchrun, "--max-restarts", "3", *script], env=env))
    return max(abs(each.wait()) for each in started)


if __name__ == "__main__":
    sys.exit(main())
