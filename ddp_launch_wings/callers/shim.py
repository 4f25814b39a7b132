"""`ddp-launch as-torchrun install|remove|status`: makes `torchrun` of this Python environment start our agent.

Two files are written: `torchrun` beside this interpreter, with torch's kept beside it, and a .pth file, by which each
interpreter of the environment replaces `torch.distributed.run.run` when it imports that module.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Mapping

from launcher.settings.arguments import UsageError
from rendezvous.values.error_codes import Code

_SCRIPT = """#!{python}
# torchrun by ddp-launch; `ddp-launch as-torchrun remove` brings torch's back
import sys

from _ddp_launch_entry import ddp_launch

if __name__ == "__main__":
    sys.argv[1:1] = ["--as-torchrun"]
    sys.exit(ddp_launch())
"""
_MARK = b"torchrun by ddp-launch"
# Without ddp-launch, the line does nothing.
_PTH = 'import os; exec("try:\\n import ddp_launch_wings.callers.hook\\nexcept ImportError:\\n pass")\n'
_PTH_NAME = "zz_ddp_launch_as_torchrun.pth"  # after the files that add folders to sys.path


def command(words: list[str], _environ: Mapping[str, str], _tell: Callable[[str], None]) -> str:
    files = ShimFiles(sysconfig.get_path("scripts"), sysconfig.get_path("purelib"))
    match words:
        case ["install"]:
            return _attempt(files.install)
        case ["remove"]:
            return _attempt(files.remove)
        case ["status"]:
            return files.status()
    raise UsageError(
        "as-torchrun: use ddp-launch as-torchrun install, remove or status.", code=Code.INVALID_COMMAND_LINE
    )


def _attempt(change: Callable[[], str]) -> str:
    try:
        return change()
    except OSError as error:
        raise UsageError(
            f"cannot write {error.filename}: {error.strerror}.", code=Code.INVALID_VALUE
        ) from None


class ShimFiles:
    def __init__(self, scripts: str, packages: str) -> None:
        self._torchrun = os.path.join(scripts, "torchrun")
        self._torchs = os.path.join(scripts, "torchrun.of-torch")
        self._pth = os.path.join(packages, _PTH_NAME)

    @property
    def is_ours(self) -> bool:
        try:
            with open(self._torchrun, "rb") as file:
                return _MARK in file.read(1024)
        except OSError:
            return False

    def install(self) -> str:
        if os.path.exists(self._torchrun) and not self.is_ours:
            os.replace(self._torchrun, self._torchs)
        _write(self._torchrun, _SCRIPT.format(python=sys.executable), 0o755)
        _write(self._pth, _PTH, 0o644)
        changed = f"{self._torchrun} and torch.distributed.run start ddp-launch from now on"
        return f"{changed}; ddp-launch as-torchrun remove ends this"

    def remove(self) -> str:
        """A `torchrun` that pip has installed since is newer than the one that was kept."""
        if self.is_ours:
            os.remove(self._torchrun)
            if os.path.exists(self._torchs):
                os.replace(self._torchs, self._torchrun)
        for left in (self._torchs, self._pth):
            if os.path.exists(left):
                os.remove(left)
        return "torchrun and torch.distributed.run are torch's"

    def status(self) -> str:
        command = f"{self._torchrun} starts {'ddp-launch' if self.is_ours else 'the agent of torch'}"
        calls = "ddp-launch" if os.path.exists(self._pth) else "the agent of torch"
        return f"{command}; calls of torch.distributed.run start {calls}"


def _write(path: str, text: str, mode: int) -> None:
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(f"{path}.new", mode)
    os.replace(f"{path}.new", path)
