"""The version of ddp-launch. See rendezvous/values/version.py for the versions that work together."""

from rendezvous.values.version import VERSION

__all__ = ["VERSION"]
