"""Reads the TOML file of `--config`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.settings.arguments import UsageError
from launcher.settings.config import ConfigFile, config_from
from launcher.settings.values import shown

if TYPE_CHECKING:
    from launcher.settings.config import Setting

MAX_BYTES = 1 << 20


def read_config(asked: Setting) -> ConfigFile:
    """What `--config` or DDP_LAUNCH_CONFIG names; nothing when neither was given."""
    if not asked.given:
        return ConfigFile()
    import tomllib

    path, name = str(asked.value), shown(str(asked.value))
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise asked.wrong("larger than 1 MiB; it cannot be a file of options")
        table = tomllib.loads(data.decode())
    except FileNotFoundError:
        raise asked.wrong("there is no such file") from None
    except OSError as error:
        raise asked.wrong(f"cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{name}: line {line}: not UTF-8; save the file as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{name}: not TOML: {shown_reason(str(error))}") from None
    except RecursionError:
        raise UsageError(f"{name}: not TOML that can be read: nested too deeply") from None
    return config_from(name, table)


def shown_reason(reason: str) -> str:
    """A library's own message, held to one printable line."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in reason).split())
