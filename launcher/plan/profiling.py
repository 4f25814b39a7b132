"""Runs some steps of the script on this machine, and reads the profiles that its ranks leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any

from launcher.plan.profile import BadProfile, Profile, from_text, merged
from launcher.settings.arguments import UsageError
from launcher.settings.values import printable
from rendezvous.values.error_codes import Code

if TYPE_CHECKING:
    from collections.abc import Mapping

_PATH, _STEPS = "DDP_STEP_PROFILE", "DDP_STEP_PROFILE_STEPS"  # ddp/telemetry/step_profile.py reads them
_SHOWN_LINES = 15
_STOP_S = 30.0


class CannotProfile(UsageError):
    exit_code = 1
    code = Code.CANNOT_PROFILE


def read_profile(path: str) -> Profile:
    try:
        with open(path, encoding="utf-8") as file:
            return from_text(file.read())
    except OSError as error:
        raise UsageError(
            f"cannot read the profile {printable(path)}: {error.strerror}.", code=Code.FILE_UNREADABLE
        ) from None
    except (BadProfile, UnicodeDecodeError) as error:
        raise CannotProfile(
            f"cannot use the profile {printable(path)}: {error}. Make a new one with --save-profile."
        ) from None


def record_profile(
    words: tuple[str, ...], ranks: int, steps: int, timeout_s: float, environ: Mapping[str, str]
) -> Profile:
    """Run the script until its ranks have recorded enough steps."""
    with tempfile.TemporaryDirectory(prefix="ddp-plan-") as folder:
        path, log = os.path.join(folder, "profile"), os.path.join(folder, "log")
        command = [
            sys.executable,
            "-m",
            "launcher",
            "--nproc-per-node",
            str(ranks),
            "--max-restarts",
            "0",
            *words,
        ]
        env = {**environ, _PATH: path, _STEPS: str(steps)}
        with open(log, "wb") as output:
            code = _run(command, env, output, timeout_s)
        records = [_read(f"{path}.{rank}") for rank in range(ranks)]
        found = [record for record in records if record is not None]
        for record in found:
            if "problem" in record:
                raise CannotProfile(f"this script cannot be profiled: {record['problem']}.")
        if len(found) < ranks or not all(record["gradients"] for record in found):
            raise _no_profile(words, code, timeout_s, log)
        return merged(found)


def _run(command: list[str], env: dict[str, str], output: Any, timeout_s: float) -> int | None:
    """The exit code of the job; None if it took too long and was stopped."""
    process = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
    )
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _read(path: str) -> dict[str, Any] | None:
    try:
        with open(path, encoding="utf-8") as file:
            record: dict[str, Any] = json.load(file)
    except FileNotFoundError:
        return None
    return record


def _no_profile(words: tuple[str, ...], code: int | None, timeout_s: float, log: str) -> CannotProfile:
    if code is None:
        reason = f"did not make enough steps within {timeout_s:g} s. Use --profile-timeout or fewer --steps"
    elif code:
        reason = f"failed (exit code {code}) before it had made enough steps. Run it with ddp-launch first"
    else:
        reason = "made fewer than 8 training steps with an optimizer of torch. Use a longer run"
    with open(log, encoding="utf-8", errors="replace") as file:
        tail = "".join(file.readlines()[-_SHOWN_LINES:]).rstrip()
    said = f" The end of its output:\n{tail}" if tail else ""
    return CannotProfile(f"{printable(words[-1] if words[0] == '-m' else words[0])} {reason}.{said}")
