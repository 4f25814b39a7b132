"""`ddp-launch warm start|stop|status`."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from launcher.ranks.zygote_starter import ZygoteStarter
from launcher.settings.arguments import UsageError
from launcher.settings.spec import EntryKind, LaunchSpec
from launcher.template.pool_folder import (
    PoolFolder,
    PoolSettings,
    Unusable,
    boot_id,
    open_folder,
    usual_place,
)
from launcher.warm_pool import client
from launcher.warm_pool.pooled_start import recipe_of
from rendezvous.values.durations import short_duration
from rendezvous.values.error_codes import Code

if TYPE_CHECKING:
    from launcher.settings import config

WORDS = ("start", "stop", "status")
_IMPORT_S = 300.0
_BEGIN_S = 30.0
_LOOK_S = 0.02
_MOST_NOTES = 8


class CannotWarm(UsageError):
    """The pool is on, but its template could not be made."""

    exit_code = 1
    code = Code.NO_WARM_TEMPLATE


def start(settings: config.Settings, spec: LaunchSpec | None) -> str:
    """Turn the pool on. With a script, also make its template, and wait until it is ready."""
    path = settings["warm_dir"] or usual_place()
    folder = _opened(path, create=True)
    folder.turn_on(
        PoolSettings(settings["warm_idle"], settings["warm_templates"], settings["warm_memory"], boot_id())
    )
    idle = short_duration(settings["warm_idle"])
    limits = f"at most {settings['warm_templates']} templates, each until it is unused for {idle}"
    if spec is None:
        return (
            f"The warm pool is on ({path}): {limits}.\n"
            "The next command leaves a template when it has ended; commands after it start from that."
        )
    return f"The warm pool is on ({path}): {limits}.\n{_make_template(folder, spec)}"


def _make_template(folder: PoolFolder, spec: LaunchSpec) -> str:
    if spec.entry.kind is EntryKind.PROGRAM or not spec.warm_start:
        raise CannotWarm(
            f"no template of {spec.entry.target}: its ranks are not forked (--no-python, --no-warm-start)",
        )
    starter = ZygoteStarter(spec)
    if not starter.warm:
        raise CannotWarm(f"no template of {spec.entry.target}: {starter.obstacle}")
    recipe = recipe_of(spec, starter, folder)
    name = client.serving(folder, recipe.name, recipe.key)
    if not client.is_there(folder, name):
        os.close(client.plant(recipe))
    began = time.monotonic()
    while name not in folder.templates() and time.monotonic() - began < _BEGIN_S:
        time.sleep(_LOOK_S)
    found = client.state_of(folder, name, _IMPORT_S)
    if found is None:
        raise CannotWarm(
            f"the template of {recipe.title} has ended. {''.join(folder.notes()[-1:])}",
        )
    return f"The template of {recipe.title} is ready (pid {found['pid']}, {_size(found['bytes'])})."


def stop(settings: config.Settings) -> str:
    path = settings["warm_dir"] or usual_place()
    try:
        folder = _opened(path)
    except FileNotFoundError:
        return "The warm pool is off."
    was_on = folder.settings() is not None
    folder.turn_off()
    with folder.locked():
        ended = sum(client.end(folder, name) for name in folder.templates())
    if not was_on and not ended:
        return "The warm pool is off."
    folder.note("the pool is off: ddp-launch warm stop")
    return f"The warm pool is off. {ended} template{'s have' if ended != 1 else ' has'} ended; running jobs go on."


def status(settings: config.Settings) -> tuple[str, int]:
    """Return the text, and the exit code: 1 if the pool is off."""
    path = settings["warm_dir"] or usual_place()
    try:
        folder = _opened(path)
    except FileNotFoundError:
        return "The warm pool is off. `ddp-launch warm start` turns it on.", 1
    found = folder.settings()
    if found is None:
        return "\n".join(("The warm pool is off. `ddp-launch warm start` turns it on.", *_notes(folder))), 1
    lines = [
        f"The warm pool is on: {path}",
        f"At most {found.most_templates} templates, {_size(found.most_bytes)} together; a template ends after "
        f"{short_duration(found.idle_s)} without a command.",
    ]
    return "\n".join((*lines, *_templates(folder), *_notes(folder))), 0


def _templates(folder: PoolFolder) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("KEY", "PID", "AGE", "MEMORY", "SERVED", "RUNNING", "IDLE LEFT", "SCRIPT")
    ]
    for name in folder.templates():
        state = client.state_of(folder, name) if folder.is_ready(name) else None
        if state is not None:
            rows.append(_row(name, state))
        elif client.is_there(folder, name):
            rows.append((name[:8], "-", "-", "-", "-", "-", "-", "(imports torch)"))
        else:
            folder.forget(name)  # killed: only its files are left
    if len(rows) == 1:
        return ["No template yet: the next command leaves one when it has ended."]
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _row(name: str, state: dict[str, Any]) -> tuple[str, ...]:
    left_s = state["idle_left_s"]
    return (
        name[:8],
        str(state["pid"]),
        short_duration(state["age_s"]),
        _size(state["bytes"]),
        str(state["served"]),
        str(state["running"]),
        "-" if left_s is None else short_duration(left_s),
        state["title"],
    )


def _notes(folder: PoolFolder) -> list[str]:
    notes = folder.notes()[-_MOST_NOTES:]
    return ["Last events:", *(f"  {each}" for each in notes)] if notes else []


def _opened(path: str, create: bool = False) -> PoolFolder:
    try:
        return open_folder(path, create)
    except FileNotFoundError:
        if create:
            raise UsageError(
                f"cannot create {path}: its parent folder does not exist", code=Code.FOLDER_UNUSABLE
            ) from None
        raise
    except Unusable as error:
        raise UsageError(str(error), code=Code.FOLDER_UNUSABLE) from None


def _size(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"
