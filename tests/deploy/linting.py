"""Linters over deploy/: `python tests/deploy/linting.py`, which is `make lint-deploy`. All must be silent.

hadolint, shellcheck and yamllint are small and part of the suite as well; checkov is a hundred packages, and has an
environment of its own. It is shown what a cluster would be: overlays and the chart as they are rendered, and jobs.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import charts
import yaml

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parents[2]
DEPLOY = charts.DEPLOY
OVERLAYS = ("dev", "production")
_HERE = Path(sys.executable).parent
_CHECKOV = ROOT / ".venv-lint" / "bin" / "checkov"


def hadolint(files: list[Path]) -> list[str]:
    return [str(_HERE / "hadolint"), "--config", str(DEPLOY / "docker" / ".hadolint.yaml"), *map(str, files)]


def shellcheck(files: list[Path]) -> list[str]:
    # SC2015 warns of `A && B || C`, since C runs as well where B fails: which is what is meant wherever we write it.
    return [str(_HERE / "shellcheck"), "--shell=bash", "--exclude=SC2015", *map(str, files)]


def yamllint(files: list[Path]) -> list[str]:
    return [
        str(_HERE / "yamllint"),
        "--strict",
        "--config-file",
        str(DEPLOY / ".yamllint.yaml"),
        *map(str, files),
    ]


def dockerfiles() -> list[Path]:
    return sorted((DEPLOY / "docker").glob("*.Dockerfile"))


def scripts() -> list[Path]:
    return [
        *sorted(DEPLOY.rglob("*.sbatch")),
        *sorted(DEPLOY.rglob("*.sh")),
        ROOT / "tests" / "system-packages.sh",
    ]


def checkov(folder: Path) -> list[str]:
    return [str(_CHECKOV), "--config-file", str(DEPLOY / ".checkov.yaml"), "--directory", str(folder)]


def service(folder: Path) -> Path:
    for name in OVERLAYS:
        _write(folder / f"overlay-{name}.yaml", charts.overlay(name))
    for name, values in (("production", {}), ("dev", charts.values_of("values-dev.yaml"))):
        _write(folder / f"chart-{name}.yaml", [_installed(each) for each in charts.rendered(values)])
    return folder


def _installed(found: charts.Object) -> charts.Object:
    """Helm says the namespace when it installs, and not in what it renders."""
    return {**found, "metadata": {"namespace": "ddp-rendezvous", **found["metadata"]}}


def _write(path: Path, objects: Iterable[charts.Object]) -> None:
    path.write_text(yaml.safe_dump_all(objects))


def main() -> int:
    if not _CHECKOV.exists():
        print("checkov is not installed; `make lint-deploy` does it", file=sys.stderr)
        return 2
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        linters = [hadolint(dockerfiles()), shellcheck(scripts()), yamllint([DEPLOY])]
        # Jobs apart from the service: else its network policies would be taken for theirs.
        places = (service(Path(folder)), DEPLOY / "jobs" / "kubernetes", DEPLOY / "docker")
        for command in (*linters, *map(checkov, places)):
            name = Path(command[0]).name
            print(f"{name} ...", flush=True)
            if subprocess.run(command).returncode:
                failed.append(name)
    print(f"findings of: {', '.join(failed)}" if failed else "no findings")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
