"""Refuses an interpreter that is too old. Imported before all other modules of this folder, which it could not read."""

import sys

LEAST = (3, 11)


def too_old(version):  # type: ignore[no-untyped-def]  # annotations of today are errors in a Python of then
    """Why this version of Python cannot be used; "" if it can."""
    if tuple(version[:2]) >= LEAST:
        return ""
    return (
        "gpu: {} is Python {}.{}, and ddp-launch needs {}.{} or newer. Name another one with PYTHON=".format(
            sys.executable, version[0], version[1], *LEAST
        )
    )


if too_old(sys.version_info):
    sys.stderr.write(too_old(sys.version_info) + "\n")
    sys.exit(2)
