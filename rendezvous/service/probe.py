"""`python -m rendezvous.service.probe`: does the service of this container answer? For engines that run a command."""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request

_LIMIT_S = 4.0


def main() -> int:
    """0: it does, or it serves no HTTP and there is nothing to look at."""
    host, _, port = os.environ.get("DDP_RENDEZVOUS_HTTP", "").rpartition(":")
    if not port:
        return 0
    here = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "*": "127.0.0.1"}.get(host, host)
    try:
        with urllib.request.urlopen(f"http://{here}:{port}/livez", timeout=_LIMIT_S):
            return 0
    except (OSError, urllib.error.URLError) as error:
        sys.stderr.write(f"ddp-rendezvous: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
