"""Which files of the script the ranks of this node run: those on disk, or those of an earlier generation.

When ranks start with the files on disk, their contents are read and kept, so that a reload can be rolled back (see
rendezvous/rounds/policy.py). A file that is changed in the milliseconds between is kept as it is then.

After a rollback the ranks run copies of these files in the scratch folder of the node. The user's files are never
changed.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from launcher.ranks import script_files
from launcher.ranks.script_files import ScriptFiles, ScriptUnreadable
from launcher.settings.spec import EntryKind
from rendezvous.values.questions import CannotAnswer, SourcesSeen

if TYPE_CHECKING:
    from launcher.settings.spec import EntryPoint, LaunchSpec
    from rendezvous.values.questions import Told
    from rendezvous.values.types import Assignment

_KEPT = 64  # generations
_NAMED = 20  # changed files
_ONLY_SCRIPTS = (
    "only a Python script can be reloaded, not a module (-m), a folder or another program. Use `ddpctl restart`, "
    "which starts the job again from the files on disk"
)


class Editions:
    def __init__(self, spec: LaunchSpec, scratch: str) -> None:
        self._spec, self._scratch = spec, scratch
        self.entry = spec.entry
        self._kept: dict[int, asyncio.Task[ScriptFiles | None]] = {}  # by generation
        self._running = 0  # the generation whose files the ranks run; 0: none has started

    @property
    def _can_reload(self) -> bool:
        return self._spec.entry.kind is EntryKind.SCRIPT and not os.path.isdir(self._spec.entry.target)

    # --- keeping -------------------------------------------------------------------------------------------

    def ranks_started(self, assignment: Assignment) -> None:
        """Keep the files with which the ranks have started."""
        if not self._can_reload or assignment.kept_from in self._kept:
            self._running = assignment.kept_from
            return
        generation = assignment.generation
        if assignment.in_place and self._running in self._kept:  # most ranks have kept their processes
            self._kept[generation] = self._kept[self._running]
        else:
            reading = asyncio.to_thread(_read, self._spec.entry.target)
            self._kept[generation] = asyncio.get_running_loop().create_task(reading)
        self._running = generation
        for old in sorted(self._kept)[:-_KEPT]:
            del self._kept[old]

    async def _files_of(self, generation: int) -> ScriptFiles | None:
        reading = self._kept.get(generation)
        return None if reading is None else await asyncio.shield(reading)

    # --- what a reload would start ---------------------------------------------------------------------------

    async def seen(self, *, watches: bool) -> Told:
        if not self._can_reload:
            return CannotAnswer(_ONLY_SCRIPTS)
        try:
            files = await asyncio.to_thread(script_files.read, self._spec.entry.target)
        except ScriptUnreadable as error:
            return CannotAnswer(str(error))
        before = await self._files_of(self._running)
        changed = files.changed_since(before)
        problem = self._preloaded(files) or await asyncio.to_thread(
            script_files.problem, files, changed, self._spec.python
        )
        keeps = before is not None and not before.left_out
        named = tuple(changed[:_NAMED])
        return SourcesSeen(files.script, files.checksum, named, problem, watches=watches, keeps=keeps)

    def _preloaded(self, files: ScriptFiles) -> str:
        """The template has already imported these modules: new ranks would not read their files."""
        for name in self._spec.preload:
            first = name.partition(".")[0]
            if any(os.path.exists(os.path.join(files.folder, each)) for each in (first, f"{first}.py")):
                return (
                    f"{name} is in the folder of the script and is imported before the ranks start (--preload), so it "
                    "would not be read again. Start the job without this --preload"
                )
        return ""

    # --- changing --------------------------------------------------------------------------------------------

    async def change(self, kept_from: int) -> str:
        """Let the next ranks run the files of this generation; 0: those on disk. Return what went wrong."""
        self.entry = self._spec.entry
        if not kept_from:
            return ""
        files = await self._files_of(kept_from)
        if files is None or files.left_out:
            return (
                f"the job runs the script as it was in generation {kept_from}, and this agent does not have these "
                "files: it was started later. Its ranks run the files on disk"
            )
        try:
            self.entry = await asyncio.to_thread(self._copied, files, kept_from)
        except OSError as error:
            where = f"cannot copy the earlier files of the script to {self._scratch}: {error.strerror}"
            return f"{where}. The ranks run the files on disk"
        return ""

    def _copied(self, files: ScriptFiles, kept_from: int) -> EntryPoint:
        where = os.path.join(self._scratch, f"script-{kept_from}")
        if not os.path.exists(os.path.join(where, files.name)):
            script_files.write(files, where)
        return replace(self._spec.entry, target=os.path.join(where, files.name))


def _read(script: str) -> ScriptFiles | None:
    try:
        return script_files.read(script)
    except ScriptUnreadable:  # the ranks report it
        return None
