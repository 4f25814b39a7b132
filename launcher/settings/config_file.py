"""Read the TOML file of `--config`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.settings.arguments import UsageError
from launcher.settings.config import ConfigFile, config_from
from launcher.settings.values import printable
from rendezvous.values.error_codes import Code

if TYPE_CHECKING:
    from launcher.settings.config import Setting

MAX_BYTES = 1 << 20


def read_config(asked: Setting) -> ConfigFile:
    """Read the file of `--config` or DDP_LAUNCH_CONFIG; an empty ConfigFile if neither is set."""
    if not asked.given:
        return ConfigFile()
    import tomllib

    path, name = str(asked.value), printable(str(asked.value))
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise asked.wrong(
                "the file is larger than 1 MiB", "use a TOML file of options", code=Code.CONFIG_FILE_INVALID
            )
        table = tomllib.loads(data.decode())
    except FileNotFoundError:
        raise asked.wrong("the file does not exist", "check the path", code=Code.FILE_UNREADABLE) from None
    except OSError as error:
        raise asked.wrong(
            f"cannot read the file ({error.strerror})",
            "check the path and its permissions",
            code=Code.FILE_UNREADABLE,
        ) from None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"{name}: line {line} is not UTF-8. Save the file as UTF-8.", code=Code.CONFIG_FILE_INVALID
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(
            f"{name} is not valid TOML: {one_line(str(error))}. Fix the syntax error.",
            code=Code.CONFIG_FILE_INVALID,
        ) from None
    except RecursionError:
        raise UsageError(
            f"{name} cannot be parsed: it is nested too deeply. Use flat keys.", code=Code.CONFIG_FILE_INVALID
        ) from None
    return config_from(name, table)


def one_line(reason: str) -> str:
    """The message of a library as one printable line."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in reason).split())
