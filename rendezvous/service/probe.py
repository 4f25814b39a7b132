"""`python -m rendezvous.service.probe`: a liveness probe for container engines that run a command."""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request

_LIMIT_S = 4.0


def main() -> int:
    """Return exit code 0 if the service answers, or if --http is not set; otherwise 1."""
    host, _, port = os.environ.get("DDP_RENDEZVOUS_HTTP", "").rpartition(":")
    if not port:
        return 0
    here = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "*": "127.0.0.1"}.get(host, host)
    try:
        with urllib.request.urlopen(f"http://{here}:{port}/livez", timeout=_LIMIT_S):
            return 0
    except (OSError, urllib.error.URLError) as error:
        sys.stderr.write(f"ddp-rendezvous: no answer from http://{here}:{port}/livez: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
