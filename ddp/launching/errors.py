"""What goes wrong with a job of `ddp.launch`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddp.telemetry.coded import CodedError

if TYPE_CHECKING:
    from collections.abc import Mapping

INVALID_ARGUMENT, CANNOT_PICKLE, RESULT_UNREADABLE = "DDP-6001", "DDP-6002", "DDP-6003"
PACKAGE_MISSING, JOB_FAILED = "DDP-1019", "DDP-5011"


class LaunchError(CodedError, RuntimeError):
    """A job of `ddp.launch` could not start, or failed. `failure` has the facts of failure.json."""

    def __init__(
        self, text: str, code: str, exit_code: int = 2, failure: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(text)
        self.code = code
        self.exit_code = exit_code
        self.failure = dict(failure or {})
        cause = self.failure.get("first_cause") or {}
        self.rank: int | None = cause.get("rank")
        self.node: str = cause.get("node", "")
        self.traceback: str = cause.get("traceback", "")
        self.log_dir: str = self.failure.get("log_dir", "")

    def __reduce__(self) -> tuple[type[LaunchError], tuple[object, ...]]:
        return LaunchError, (self.args[0], self.code, self.exit_code, self.failure)


def of_ending(ending: Mapping[str, Any], exit_code: int) -> LaunchError:
    """The error of a job that has ended so; `ending` is empty if its agent could not write it."""
    failure = ending.get("failure") or {}
    text = str(failure.get("summary") or ending.get("reason") or f"the job ended with exit code {exit_code}")
    found = LaunchError(text, str(ending.get("code") or JOB_FAILED), exit_code, failure)
    rows = [text]
    if found.traceback:
        rows += ["", f"the traceback of rank {found.rank}:", found.traceback.rstrip(), ""]
    if found.log_dir:
        rows += [f"the logs are in {found.log_dir}"]
    found.args = ("\n".join(rows),)
    return found
