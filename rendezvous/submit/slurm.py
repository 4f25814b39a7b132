"""A job file as a batch script for Slurm. Pure."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from rendezvous.submit.job_file import megabytes

if TYPE_CHECKING:
    from rendezvous.submit.job_file import JobFile


def script(job: JobFile) -> str:
    lines = ["#!/bin/bash", *(f"#SBATCH {words}" for words in _directives(job)), "", "set -eo pipefail"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in job.env.items()]
    lines += job.slurm.setup
    if job.image:
        lines.append(f"# {job.image} is for Kubernetes; how containers run here is for [slurm] setup to say")
    # One agent on each machine. Neither one that fails nor a machine that is lost ends the step; the agents see to it.
    words = ["ddp-launch", *job.launch(*_said(job))]
    lines += ["", f"exec srun --kill-on-bad-exit=0 --no-kill {shlex.join(words)}"]
    return "\n".join(lines) + "\n"


def _said(job: JobFile) -> list[str]:
    where = ["--rendezvous", job.rendezvous] if job.rendezvous else []
    return [*where, "--checkpoint-grace", f"{max(1, job.slurm.signal_s - 30)}s"]


def _directives(job: JobFile) -> list[str]:
    where, wanted = job.slurm, job.resources
    found = [
        f"--job-name={job.name}",
        f"--nodes={job.machines}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={max(1, round(_cpus(wanted.cpu)))}",
        f"--mem={megabytes(wanted.memory)}M",
        f"--output={job.name}-%j.log",
        f"--signal=USR1@{where.signal_s}",
    ]
    if wanted.gpus:
        found.append(f"--gpus-per-node={wanted.gpus}")
    named = ("partition", "account", "qos", "time", "reservation")
    found += [f"--{name}={getattr(where, name)}" for name in named if getattr(where, name)]
    found.append("--requeue" if where.requeue else "--no-requeue")
    found.append("--open-mode=append")
    if job.is_elastic or job.spares:
        found.append("--no-kill")
    return [*found, *where.options]


def _cpus(quantity: str) -> float:
    return float(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)
