"""The version that agents of one job must share."""

from rendezvous.values.version import VERSION

__all__ = ["VERSION"]
