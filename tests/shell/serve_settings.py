"""What `ddp-rendezvous serve` makes of a container's arguments and environment, without starting it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rendezvous.service import settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def parse_serve(argv: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser("ddp-rendezvous serve")
    settings.add_arguments(parser)
    return settings.settle(parser.parse_args(argv), environ)
