"""Takes the zygote of a command from the user's warm pool, if there is one.

Only commands whose user has turned a pool on do more here than look for a folder.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from launcher.template.pool_folder import PoolFolder, Unusable, open_folder, usual_place

if TYPE_CHECKING:
    from launcher.ranks.zygote_starter import ZygoteStarter
    from launcher.settings.spec import LaunchSpec
    from launcher.warm_pool.client import PooledZygote, Recipe

_seeds: list[int] = []  # each becomes a template when this process ends


def folder_of(spec: LaunchSpec) -> str:
    return spec.warm_dir or usual_place()


def take_zygote(spec: LaunchSpec, starter: ZygoteStarter) -> PooledZygote | None:
    """Return None if the command has to start cold. Then a template is left for the next one."""
    if not spec.warm_pool or not starter.warm:
        return None
    try:
        folder = open_folder(folder_of(spec))
    except (OSError, Unusable):
        return None
    if not folder.is_on():
        folder.close()
        return None
    try:
        return _take_or_plant(spec, starter, folder)
    except Exception as error:  # whatever it is, the job starts without the pool
        folder.note(f"{_title(spec)} started cold: {type(error).__name__}: {error}")
        return None


def _take_or_plant(spec: LaunchSpec, starter: ZygoteStarter, folder: PoolFolder) -> PooledZygote | None:
    from launcher.template import pool_folder
    from launcher.warm_pool import client

    recipe = recipe_of(spec, starter, folder)
    keys = folder.keys()
    why = "its template still imports torch" if _imports(folder, recipe) else ""
    for name, key in keys.items():
        if not pool_folder.differences(recipe.key, key):
            try:
                return client.take(folder, name, _request(spec, starter, recipe))
            except client.NotServed as reason:
                why = str(reason)
    missed = pool_folder.why_missed(recipe.key, list(keys.values()))
    why = why or (f"no template fits: {missed}" if missed else "there is no template yet")
    folder.note(f"{recipe.title} started cold: {why}")
    from launcher.warm_pool import client

    _seeds.append(client.plant(recipe))
    return None


def _imports(folder: PoolFolder, recipe: Recipe) -> bool:
    from launcher.warm_pool import client

    return (
        recipe.name in folder.templates()
        and not folder.is_ready(recipe.name)
        and client.is_there(folder, recipe.name)
    )


def recipe_of(spec: LaunchSpec, starter: ZygoteStarter, folder: PoolFolder) -> Recipe:
    from launcher.ranks.zygote import warm_command
    from launcher.template import pool_folder
    from launcher.warm_pool.client import Recipe, key_of

    def command(pool: dict[str, Any]) -> tuple[tuple[str, ...], dict[str, str]]:
        return warm_command(spec, starter.env, {"pool": pool})

    key = key_of(spec, starter.env)
    return Recipe(folder, pool_folder.name_of(key), key, _title(spec), spec.entry.args, command)


def _title(spec: LaunchSpec) -> str:
    return spec.entry.target


def _request(spec: LaunchSpec, starter: ZygoteStarter, recipe: Recipe) -> dict[str, Any]:
    from launcher.ranks.zygote import rank_argv

    return {
        "key": recipe.key,
        "env": starter.env,
        "argv": rank_argv(spec.entry, sys.executable, spec.entry.args),
        "args": spec.entry.args,
        "config": {
            "cgroup": starter.cgroup,
            "scratch": starter.scratch,
            "learns": spec.learn_imports,
        },
    }
