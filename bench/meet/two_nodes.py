"""Two nodes of one job on this host: the same command twice. Ends with the last of them, as the worse of them.

python bench/meet/two_nodes.py COMMAND [ARGUMENT ...]
"""

from __future__ import annotations

import subprocess
import sys


def main() -> int:
    nodes = [subprocess.Popen(sys.argv[1:], start_new_session=True) for _ in range(2)]
    return max(abs(node.wait()) for node in nodes)


if __name__ == "__main__":
    sys.exit(main())
