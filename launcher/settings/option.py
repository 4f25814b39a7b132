"""The type of one option of `ddp-launch`; launcher/settings/options.py is the table of all options."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any

from launcher.settings import values
from rendezvous.values.late_dataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable


class Reach(IntEnum):
    """Sources that may set an option; each value also allows the sources of the values before it."""

    FLAG = 0
    ENVIRONMENT = 1
    FILE = 2


@dataclass(frozen=True, slots=True)
class Option:
    flag: str
    help: str
    parse: Callable[[str], Any] = values.text
    metavar: str = ""  # empty for a switch
    default: str | None = None
    short: str = ""
    negatable: bool = False  # a switch that also has a --no- form
    torchrun: bool = False
    pet: bool = False  # torchrun reads PET_<DEST>
    # Another variable, and the function that converts its text.
    foreign: tuple[str, Callable[[str], str]] | None = None
    # The reason why an option has no effect; it is accepted for compatibility with torchrun.
    without_effect: str = ""
    # The field of LaunchSpec, JobSpec or LogSpec that gets the value, if it has another name than the option.
    field: str = ""
    reach: Reach = Reach.FILE

    @property
    def dest(self) -> str:
        return self.flag[2:].replace("-", "_")

    @property
    def is_switch(self) -> bool:
        return not self.metavar

    @property
    def spellings(self) -> tuple[str, ...]:
        return (self.flag, "--no-" + self.flag[2:]) if self.negatable else (self.flag,)

    @property
    def variables(self) -> tuple[str, ...]:
        """Environment variables in order of precedence."""
        ours = (f"DDP_LAUNCH_{self.dest.upper()}",) if self.reach >= Reach.ENVIRONMENT else ()
        return (*ours, f"PET_{self.dest.upper()}") if self.pet else ours


def ours(
    flag: str, metavar: str, default: str | None, parse: Callable[[str], Any], text: str, **more: Any
) -> Option:
    return Option(flag, text, parse, metavar, default, **more)


def torch(
    flag: str, metavar: str, default: str | None, parse: Callable[[str], Any], text: str, **more: Any
) -> Option:
    return Option(flag, text, parse, metavar, default, torchrun=True, **{"pet": True, **more})


def switch(flag: str, text: str, **more: Any) -> Option:
    return Option(flag, text, values.switch, **{"default": "0", **more})


def torch_switch(flag: str, text: str, **more: Any) -> Option:
    return switch(flag, text, torchrun=True, pet=True, **more)
