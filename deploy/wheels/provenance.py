"""What was made of what: SHA256SUMS, and a statement in the form of in-toto with the predicate of SLSA. Unsigned.

It can be checked without trusting it: the build is reproducible, so the same commit gives the same digests.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

STATEMENT = "ddp-launch.provenance.json"
SUMS = "SHA256SUMS"


def write(folder: Path, released: list[Path], root: Path, epoch: int) -> None:
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(released)}
    (folder / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in digests.items()))
    made = statement(digests, _source(root), _tools(), epoch)
    (folder / STATEMENT).write_text(json.dumps(made, indent=1) + "\n")


def statement(
    digests: dict[str, str], source: dict[str, Any], tools: dict[str, str], epoch: int
) -> dict[str, Any]:
    at = datetime.fromtimestamp(epoch, UTC).isoformat().replace("+00:00", "Z")
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": each}} for name, each in digests.items()],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:ddp-launch:make-dist:1",
                "externalParameters": {"command": "make dist", "SOURCE_DATE_EPOCH": epoch},
                "internalParameters": {"changedFiles": source["changed"]},
                "resolvedDependencies": [
                    {"uri": "git+ddp-launch", "digest": {"gitCommit": source["commit"]}},
                    *(
                        {"name": name, "annotations": {"version": text}}
                        for name, text in sorted(tools.items())
                    ),
                ],
            },
            "runDetails": {
                "builder": {"id": "ddp-launch/deploy/wheels/build.py"},
                "metadata": {
                    "startedOn": at,
                    "finishedOn": at,
                },  # that of the sources: a clock would not repeat
            },
        },
    }


def _source(root: Path) -> dict[str, Any]:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout

    changed = git("status", "--porcelain", "--untracked-files=no").splitlines()
    return {"commit": git("rev-parse", "HEAD").strip(), "changed": [line[3:] for line in changed]}


def _tools() -> dict[str, str]:
    found = {"python": sys.version.split()[0], "setuptools": version("setuptools")}
    for compiler in ("x86_64-linux-gnu-gcc", "aarch64-linux-gnu-gcc"):
        if shutil.which(compiler):
            said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
            found[compiler] = said.splitlines()[0]
    return found
