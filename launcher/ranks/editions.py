"""Which files of the script the ranks of this node run: those on disk, or those of an earlier generation.

When ranks start with the files on disk, their contents are read and kept, so that a reload can be rolled back (see
rendezvous/rounds/policy.py). A file that is changed in the milliseconds between is kept as it is then.

After a rollback the ranks run copies of these files in the scratch folder of the node. The user's files are never
changed.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import subprocess
import sys
import warnings
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from launcher.settings.spec import EntryKind
from rendezvous.values.questions import CannotAnswer, SourcesSeen

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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
            files = await asyncio.to_thread(read, self._spec.entry.target)
        except ScriptUnreadable as error:
            return CannotAnswer(str(error))
        before = await self._files_of(self._running)
        changed = files.changed_since(before)
        problem = self._preloaded(files) or await asyncio.to_thread(
            problem_of, files, changed, self._spec.python
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
            write(files, where)
        return replace(self._spec.entry, target=os.path.join(where, files.name))


def _read(script: str) -> ScriptFiles | None:
    try:
        return read(script)
    except ScriptUnreadable:  # the ranks report it
        return None


# --- the files of a script -------------------------------------------------------------------------
#
# The files of a script: the script, and what it imports from its own folder. Reads, compiles and copies them.
#
# Which modules a script will import is not known before it runs. So the names are taken from the text of its import
# statements. A name that is a folder stands for all Python files in it, whichever of them are imported.

_MOST_FILES = 2000
_MOST_BYTES = 16 << 20
_MOST_ENTRIES = 20_000  # of folders that are read
_COMPILE_S = 15.0
_IMPORTS = re.compile(
    rb"^[ \t]*(?:from[ \t]+([A-Za-z_]\w*)|import[ \t]+(.+))|import_module\([ \t]*[\"']([A-Za-z_]\w*)",
    re.MULTILINE,
)
_NAME = re.compile(rb"[A-Za-z_]\w*")
_COMPILES = (
    "import sys\nfor path in sys.argv[1:]: compile(open(path, 'rb').read(), path, 'exec', dont_inherit=True)"
)


class ScriptUnreadable(Exception):
    """The message is for the user."""


class ScriptFiles:
    """`contents`: by path, relative to the folder of the script. `left_out`: why some files are missing."""

    def __init__(self, folder: str, name: str, contents: Mapping[str, bytes], left_out: str = "") -> None:
        self.folder, self.name, self.contents, self.left_out = folder, name, contents, left_out

    @property
    def script(self) -> str:
        return os.path.join(self.folder, self.name)

    @cached_property
    def checksum(self) -> str:
        found = hashlib.sha256()
        for path in sorted(self.contents):
            found.update(b"%d %d " % (len(os.fsencode(path)), len(self.contents[path])))
            found.update(os.fsencode(path) + self.contents[path])
        return found.hexdigest()

    def changed_since(self, before: ScriptFiles | None) -> list[str]:
        """The paths of files that are new, gone or different."""
        old = {} if before is None else before.contents
        return sorted(
            path for path in self.contents.keys() | old.keys() if self.contents.get(path) != old.get(path)
        )


# --- reading ----------------------------------------------------------------------------------------------


def read(script: str) -> ScriptFiles:
    """Read the files of a script. Raises `ScriptUnreadable`, but not because of a file that it imports."""
    path = os.path.realpath(script)
    folder, name = os.path.split(path)
    contents: dict[str, bytes] = {}
    try:
        contents[name] = _content(path)
    except OSError as error:
        raise ScriptUnreadable(f"cannot read {path}: {error.strerror}") from error
    left, known = [name], set[bytes]()
    while left:
        for module in _imported(contents[left.pop()]) - known:
            known.add(module)
            for found in _files_of(folder, os.fsdecode(module)):
                if found in contents:
                    continue
                with suppress(OSError):
                    contents[found] = _content(os.path.join(folder, found))
                    left.append(found)
                if len(contents) > _MOST_FILES or sum(map(len, contents.values())) > _MOST_BYTES:
                    limit = f"more than {_MOST_FILES:,} files or {_MOST_BYTES >> 20} MiB"
                    return ScriptFiles(folder, name, contents, f"{module.decode()} in {folder} has {limit}")
    return ScriptFiles(folder, name, contents)


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(_MOST_BYTES + 1)


def _imported(source: bytes) -> set[bytes]:
    """The first parts of the names of modules in import statements."""
    found = set[bytes]()
    for source_module, several, named in _IMPORTS.findall(source):
        found.update(name for name in (source_module, named) if name)
        found.update(match[0] for each in several.split(b",") if (match := _NAME.match(each.strip())))
    return found


def _files_of(folder: str, module: str) -> Iterator[str]:
    """The Python files of a module of this folder, relative to the folder."""
    if os.path.isfile(os.path.join(folder, f"{module}.py")):
        yield f"{module}.py"
    entries = 0
    for where, folders, files in os.walk(os.path.join(folder, module)):
        folders[:] = sorted(each for each in folders if not each.startswith(".") and each != "__pycache__")
        entries += len(folders) + len(files)
        if entries > _MOST_ENTRIES:
            return
        inside = os.path.relpath(where, folder)
        yield from (os.path.join(inside, each) for each in sorted(files) if each.endswith(".py"))


# --- compiling --------------------------------------------------------------------------------------------


def problem_of(files: ScriptFiles, changed: list[str], python: str = "") -> str:
    """Why the script or a changed file cannot be compiled; "" if they can. `python`: the interpreter of the ranks."""
    paths = [path for path in dict.fromkeys((files.name, *changed)) if path in files.contents]
    if python and python != sys.executable:
        return _problem_of_other(python, [os.path.join(files.folder, path) for path in paths])
    for path in paths:
        if found := _problem_of(os.path.join(files.folder, path), files.contents[path]):
            return found
    return ""


def _problem_of(path: str, source: bytes) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        return f"{error.filename or path}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    except (ValueError, RecursionError, MemoryError) as error:
        return f"{path}: {type(error).__name__}: {error}"
    return ""


def _problem_of_other(python: str, paths: list[str]) -> str:
    command = [python, "-I", "-S", "-W", "ignore", "-c", _COMPILES, *paths]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_COMPILE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{python} cannot compile the script: {error}"
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines() or [f"{python} ended with exit code {done.returncode}"]
    where = [line.strip() for line in lines if line.lstrip().startswith("File ")]
    return f"{where[-1]}: {lines[-1]}" if where else lines[-1]


# --- copying ----------------------------------------------------------------------------------------------


def write(files: ScriptFiles, where: str) -> str:
    """Write the files to a new folder, and return the path of the script there.

    All else that is in the folder of the script is there as a link, so that the script finds its data beside it.
    """
    for path, content in files.contents.items():
        target = os.path.join(where, path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "wb") as file:
            file.write(content)
    entries = 0
    for inside in {os.path.dirname(path) for path in files.contents} | {""}:
        with suppress(OSError), os.scandir(os.path.join(files.folder, inside)) as found:
            for entry in found:
                entries += 1
                link = os.path.join(where, inside, entry.name)
                if entries <= _MOST_ENTRIES and entry.name != "__pycache__" and not os.path.lexists(link):
                    os.symlink(entry.path, link)
    return os.path.join(where, files.name)
