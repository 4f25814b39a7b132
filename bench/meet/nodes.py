"""Several nodes of one job on this host: the same command N times. Ends with the last of them, as the worst of them.

python bench/meet/nodes.py N COMMAND [ARGUMENT ...]
"""

from __future__ import annotations

import subprocess
import sys


def main() -> int:
    nodes = [subprocess.Popen(sys.argv[2:], start_new_session=True) for _ in range(int(sys.argv[1]))]
    return max(abs(node.wait()) for node in nodes)


if __name__ == "__main__":
    sys.exit(main())
