"""The public name of the backends `shm` and `hier`: importing this module registers them with torch."""

from __future__ import annotations

from ddp.groups.shm import register

__all__ = ["register"]
