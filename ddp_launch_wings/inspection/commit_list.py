"""The commits in a folder, by the names and sizes of their files. Needs no torch: for `python -m ddp.elastic ls`."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ddp.elastic import commits
from ddp.elastic.files.folders import Folder, open_folder
from ddp.telemetry.coded import WrongValue


@dataclass(frozen=True, slots=True)
class Listed:
    """A commit in a folder."""

    commit: commits.CommitName
    files: dict[str, int]  # with their sizes
    parts_there: int
    parts: int
    has_manifest: bool

    @property
    def state(self) -> str:
        if self.parts_there < self.parts:
            return f"incomplete: {self.parts_there} of {self.parts} parts"
        return "complete" if self.has_manifest else "complete, without a manifest"


def listed_at(path: str, patience_s: float | None = None) -> tuple[Folder, list[Listed]]:
    """The commits in a folder, or the one whose folder it is."""
    if not path:
        raise WrongValue(
            "the name of the folder is empty. Name the folder of the commits, as in State(folder=...)"
        )
    outer, _, last = path.rstrip("/").rpartition("/")
    only = commits.parse_folder_name(last)
    folder = open_folder(path if only is None else outer or ".", patience_s)
    if not folder.is_remote:
        check_is_folder(folder.name)
    there = listed(folder)
    found = [one for one in there if only in (None, one.commit)]
    if only is not None and not found:
        known = f"It has {len(there)}; `ls` lists them" if there else "It has none"
        raise FileNotFoundError(f"there is no commit {last} in {folder.name}. {known}")
    return folder, found


def check_is_folder(path: str) -> None:
    if not os.path.exists(path):
        raise FileNotFoundError(f"the folder {path} does not exist")
    if not os.path.isdir(path):
        raise NotADirectoryError(f"{path} is a file. Name the folder of the commits, or of one of them")


def scopes_in(folder: Folder) -> list[str]:
    """The folders in a local folder that contain commits: those of States with a scope."""
    if folder.is_remote:
        return []
    inner = [entry.name for entry in os.scandir(folder.name) if entry.is_dir()]
    return sorted(name for name in inner if listed(open_folder(os.path.join(folder.name, name))))


def listed(folder: Folder) -> list[Listed]:
    by_commit: dict[commits.CommitName, dict[str, int]] = {}
    for file, identity in folder.files().items():
        commit = commits.commit_of(file)
        if commit is not None:
            sizes = identity.split("-")  # a local file has its number in front, and its time behind
            by_commit.setdefault(commit, {})[file] = int(sizes[1] if len(sizes) == 3 else sizes[0])
    return [_listed(commit, files) for commit, files in sorted(by_commit.items())]


def _listed(commit: commits.CommitName, files: dict[str, int]) -> Listed:
    names = [name for file in files if (name := commits.parse_file_name(file)) is not None]
    is_old = any(file.endswith(".ddp") for file in files)  # of release 0.1.0, which had no manifests
    has_manifest = is_old or any(file.endswith(f"/{commits.MANIFEST}") for file in files)
    return Listed(commit, files, len(names), max((name.parts for name in names), default=1), has_manifest)
