"""Where a job's logs lie: under --log-dir, or in a private temporary folder that goes away when all went well."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from launcher.settings.arguments import UsageError
from launcher.template import scratch

if TYPE_CHECKING:
    from launcher.settings.spec import LaunchSpec

_TEMPORARY_FILE_LIMIT = 64 << 20  # per stream of a rank, twice: the user did not ask for these files


class LogFolder:
    def __init__(self, spec: LaunchSpec) -> None:
        name = re.sub(r"[^\w.+-]", "_", spec.run_id) or "job"
        self.temporary = not spec.log.directory
        self.file_limit = _TEMPORARY_FILE_LIMIT if self.temporary else 0
        if self.temporary:
            self.path = _temporary(f"ddp-launch-{name}-{os.getpid()}")
            return
        try:
            self.path = _unused(os.path.join(os.path.abspath(spec.log.directory), name), spec.max_nodes > 1)
        except OSError as error:  # what could be seen beforehand, launcher.settings.checks has seen
            raise UsageError(
                f"invalid --log-dir {spec.log.directory!r}: cannot create the directory ({error.strerror}). "
                "Use another directory."
            ) from None

    def discard(self) -> None:
        """As far as it goes: ranks may have put there what cannot be removed, or removed it all."""
        scratch.remove(self.path)


def _temporary(name: str) -> str:
    """Where Python's own temporary files go; absolute, as scripts may change their folder."""
    roots = [os.path.abspath(root) for root in (os.environ.get("TMPDIR"), "/tmp", "/var/tmp", ".") if root]
    reason = ""
    for root in roots:
        path = os.path.join(root, name)
        try:
            os.mkdir(path, 0o700)  # fails if another user has created the name
        except OSError as error:
            reason = reason or f"{root}: {error.strerror}"
        else:
            return path
    raise UsageError(
        f"cannot create a directory for temporary files: {reason}. Set TMPDIR, or use --log-dir."
    )


def _unused(path: str, shared_by_nodes: bool) -> str:
    """A second run under the same id gets a folder of its own; nodes of one job share theirs.

    In what is above it others may look, but lay out nothing, whatever the umask.
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
