"""The folder of a job's logs: under --log-dir, or a private temporary folder that is removed after success."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from launcher.settings.arguments import UsageError
from launcher.template import scratch
from rendezvous.values.error_codes import Code

if TYPE_CHECKING:
    from launcher.settings.spec import LaunchSpec

ROOM = 32 << 20  # free bytes; with less, the pre-flight check of the folder would reject this node
_TEMPORARY_FILE_LIMIT = 64 << 20  # per stream of a rank, twice; the user did not request these files


class LogFolder:
    def __init__(self, spec: LaunchSpec) -> None:
        name = re.sub(r"[^\w.+-]", "_", spec.job.job_id) or "job"
        self.temporary = not spec.log.directory
        self.file_limit = _TEMPORARY_FILE_LIMIT if self.temporary else 0
        self.warning = ""
        if self.temporary:
            self.path = _temporary(f"ddp-launch-{name}-{os.getpid()}-{os.urandom(3).hex()}")
            self.warning = _why_elsewhere(self.path)
            return
        try:
            self.path = _unused(
                os.path.join(os.path.abspath(spec.log.directory), name), spec.job.max_nodes > 1
            )
        except OSError as error:  # launcher.settings.checks has found what can be detected earlier
            raise UsageError(
                f"invalid --log-dir {spec.log.directory!r}: cannot create the directory ({error.strerror}). "
                "Use another directory.",
                code=Code.FOLDER_UNUSABLE,
            ) from None

    def has_logs(self) -> bool:
        """Whether ranks were started."""
        try:
            return any(name.startswith("generation_") for name in os.listdir(self.path))
        except OSError:  # ranks may have deleted it
            return False

    def discard(self) -> None:
        """Remove the folder as far as possible; ranks may have changed or deleted it."""
        scratch.remove(self.path)


def temporary_roots() -> list[str]:
    """Where temporary folders may be, the best place first: those without room come after those that have room."""
    named = (os.environ.get("TMPDIR"), "/tmp", "/var/tmp", ".")
    roots = (os.path.abspath(root) for root in named if root)
    return sorted(roots, key=lambda root: (not os.access(root, os.W_OK | os.X_OK), _is_full(root)))


def _is_full(root: str) -> bool:
    try:
        found = os.statvfs(root)
    except OSError:
        return False
    return (0 < found.f_blocks and found.f_bavail * found.f_frsize < ROOM) or (
        0 < found.f_files and not found.f_favail
    )


def _why_elsewhere(path: str) -> str:
    wanted = os.path.abspath(os.environ.get("TMPDIR") or "/tmp")
    if os.path.dirname(path) == wanted or not _is_full(wanted):
        return ""
    reason = f"less than {ROOM >> 20} MiB or no inode is free"
    return f"{wanted} is full ({reason}): log files go to {path}. Free space in {wanted}, or set TMPDIR."


def _temporary(name: str) -> str:
    """Create the folder where Python puts temporary files. The path is absolute, as scripts may change their folder.

    The name has a random part: process numbers come again, as in a container that is started again with its old /tmp.
    """
    reason = ""
    for root in temporary_roots():
        path = os.path.join(root, name)
        try:
            os.mkdir(path, 0o700)  # fails if another user has created the name
        except OSError as error:
            reason = reason or f"{root}: {error.strerror}"
        else:
            return path
    raise UsageError(
        f"cannot create a directory for temporary files: {reason}. Set TMPDIR, or use --log-dir.",
        code=Code.FOLDER_UNUSABLE,
    )


def _unused(path: str, shared_by_nodes: bool) -> str:
    """Give a second run with the same id its own folder. The nodes of one job share theirs.

    Other users may read the folders above it but not write there, whatever the umask.
    """
    os.makedirs(os.path.dirname(path) or ".", 0o755, exist_ok=True)
    if shared_by_nodes:
        os.makedirs(path, 0o700, exist_ok=True)
        return path
    number = 1
    candidate = path
    while True:
        try:
            os.makedirs(candidate, 0o700)
        except FileExistsError:
            number += 1
            candidate = f"{path}.{number}"
        else:
            return candidate
