"""Writes the output of `ddpctl submit --dry-run` for the job files here, so that users can read and copy it.

Run `python deploy/jobs/render.py` after a change. A test compares its output with the files.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from ddp_launch_wings.submit import kubernetes, slurm  # noqa: E402
from ddp_launch_wings.submit.job import read  # noqa: E402
from rendezvous.control.formats import documents  # noqa: E402


def rendered() -> dict[Path, str]:
    found: dict[Path, str] = {}
    for path in sorted(HERE.glob("*.toml")):
        data = tomllib.loads(path.read_text())
        for kind in ("job", "jobset", "trainjob"):
            job = read({**data, "kubernetes": {**data.get("kubernetes", {}), "kind": kind}})
            found[HERE / "kubernetes" / f"{path.stem}-{kind}.yaml"] = documents(kubernetes.objects(job))
        found[HERE.parent / "slurm" / f"{path.stem}.sbatch"] = slurm.script(read(data))
    return found


if __name__ == "__main__":
    for path, text in rendered().items():
        path.write_text(text)
