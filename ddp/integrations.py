"""One line in the frameworks that people train with (docs/frameworks.md): `ddp.integrations.attach(trainer)`."""

from typing import Any


def __getattr__(name: str) -> Any:
    from _ddp_launch_entry import LIBRARY, find

    return getattr(find(LIBRARY, "ddp.integrations"), name)
