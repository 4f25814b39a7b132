"""What a warm template was started under, as names and values: pure functions.

A rank inherits more than the environment: folder, limits, priority, control group, namespaces. The template cannot take
these over from a command, so they must be equal. They form its key, whose digest is the name of its socket.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Key = dict[str, str]
_VARIABLE = "variable "
_MOST_WORDS = 4

# They tell a process about the terminal or login that it was started from. No import of a template reads them, and
# each command sets its own in the ranks.
OF_THE_TERMINAL = frozenset(
    "_ SHLVL OLDPWD COLUMNS LINES WINDOW WINDOWID STY TMUX TMUX_PANE TERM_SESSION_ID ITERM_SESSION_ID GPG_TTY "
    "SSH_CLIENT SSH_CONNECTION SSH_TTY SSH_AUTH_SOCK SSH_AGENT_PID XDG_SESSION_ID KONSOLE_DBUS_SESSION "
    "VTE_VERSION KITTY_WINDOW_ID WEZTERM_PANE VSCODE_IPC_HOOK_CLI VSCODE_GIT_IPC_HANDLE".split()
)
# Of one call of `ddp.launch`: read by its command and by the program of its ranks, after the import.
OF_A_CALL = frozenset(("DDP_CALL_FOLDER", "DDP_ENDING_FILE"))
_NOT_IN_THE_KEY = OF_THE_TERMINAL | OF_A_CALL
_OPTIONS = ("DDP_LAUNCH_", "PET_")  # options of the command, which has read them


def of_variables(environ: Mapping[str, str]) -> Key:
    """Values appear as digests: the key is written to a file, and variables hold passwords."""
    return {
        _VARIABLE + name: digest(f"{name}={value}")
        for name, value in environ.items()
        if name not in _NOT_IN_THE_KEY and not name.startswith(_OPTIONS)
    }


def digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]


def name_of(key: Key) -> str:
    return digest(json.dumps(sorted(key.items())))


_LEARNED = "learned imports"


def learned(key: Key, args: Iterable[str]) -> Key:
    """The key of the template that has also imported what the script does with these arguments.

    What a script sets in the environment before it imports a module may depend on its arguments.
    """
    return key | {_LEARNED: digest(json.dumps(list(args)))}


def has_learned(key: Key) -> bool:
    return _LEARNED in key


def differences(mine: Key, theirs: Key) -> list[str]:
    """Say in words how the command differs from the one that a template was started by."""
    found = []
    for name in sorted(mine.keys() | theirs.keys()):
        here, there = mine.get(name), theirs.get(name)
        if here == there:
            continue
        if name.startswith(_VARIABLE):
            what = "is set" if there is None else "is not set" if here is None else "has another value"
            found.append(f"{name} {what}")
        else:
            found.append(f"{name} is {here or 'unknown'}, not {there or 'unknown'}")
    return found


def why_missed(mine: Key, templates: list[Key]) -> str:
    """Return how the command differs from the template that comes closest; "" if there is no template."""
    if not templates:
        return ""
    words = min((differences(mine, each) for each in templates), key=len)
    more = len(words) - _MOST_WORDS
    return "; ".join(words[:_MOST_WORDS]) + (f"; and {more} more" if more > 0 else "")
