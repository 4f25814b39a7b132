"""A job file as a batch script for Slurm. Pure.

Slurm signals every process of the step in advance: --signal before the time limit, SIGTERM before preemption or a
requeue. Then the agents take a checkpoint (docs/rendezvous.md). Each run has its own rendezvous job id. So after a
requeue the job is a new rendezvous job, and resumes only from its checkpoint.
"""

from __future__ import annotations

import shlex
from math import ceil

from ddp_launch_wings.submit.job import JobFile, amount_of, megabytes

_KILL_MARGIN_S = 30  # of the time after the signal: what is left when the checkpoint is written
# A step does not inherit these from its job: the environment (if sbatch does not export it), and the CPUs of a task.
# Neither a failed agent nor a lost machine ends the step; the other agents recover.
_STEP = (
    'srun --export=ALL --ntasks-per-node=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=0 '
    "--no-kill"
)
# The first machine runs the rendezvous for the others; this secret authenticates them.
_SECRET = (
    'if [ -z "${DDP_RENDEZVOUS_SECRET:-}${DDP_RENDEZVOUS_SECRET_FILE:-}${DDP_LAUNCH_SECRET_FILE:-}" ]; then',
    '    DDP_RENDEZVOUS_SECRET="$(ddp-rendezvous secret)"',
    "    export DDP_RENDEZVOUS_SECRET",
    "fi",
)
_RUN = '"$SLURM_JOB_NAME-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"'


def script(job: JobFile) -> str:
    lines = ["#!/bin/bash", *(f"#SBATCH {words}" for words in _directives(job)), "", "set -eo pipefail"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in job.env.items()]
    lines += job.slurm.setup
    if not job.rendezvous and job.machines > 1:
        lines += _SECRET
    if job.image:
        lines.append(
            f"# {job.image} applies to Kubernetes only; to run in a container here, use [slurm] setup"
        )
    step = f"{_STEP} ddp-launch --rdzv-id {_RUN} {shlex.join(job.launch(*_said(job)))}"
    lines += ["", *(_requeued(step) if job.slurm.requeue else [f"exec {step}"])]
    return "\n".join(lines) + "\n"


def _requeued(step: str) -> list[str]:
    """Requeue after preemption. Slurm itself requeues only jobs that still run after the grace period."""
    return [
        "trap : TERM  # the step ends on SIGTERM; this script continues",
        "code=0",
        f"{step} || code=$?",
        'state="$(scontrol --oneliner show job "$SLURM_JOB_ID")" || state=""',
        'case "$code $state" in',
        '    "0 "*) ;;',
        '    *" JobState=RUNNING "*" PreemptTime=2"*) scontrol requeue "$SLURM_JOB_ID" ;;  # preempted',
        "esac",
        'exit "$code"',
    ]


def _said(job: JobFile) -> list[str]:
    where = ["--rendezvous", job.rendezvous] if job.rendezvous else []
    return [*where, "--checkpoint-grace", f"{max(1, job.slurm.signal_s - _KILL_MARGIN_S)}s"]


def _directives(job: JobFile) -> list[str]:
    where, wanted = job.slurm, job.resources
    found = [
        f"--job-name={job.name}",
        *_machines(job, cpus := max(1, ceil(amount_of(wanted.cpu)))),
        f"--cpus-per-task={cpus}",
        f"--mem={megabytes(wanted.memory)}M",
        f"--output={job.name}-%j.log",
        f"--signal=USR1@{where.signal_s}",
    ]
    if wanted.gpus and not where.gres:
        found.append(f"--gpus-per-node={wanted.gpus}")
    named = ("partition", "account", "qos", "time", "reservation", "constraint", "exclude", "gres", "array")
    found += [f"--{name}={shlex.quote(getattr(where, name))}" for name in named if getattr(where, name)]
    if job.workdir:
        found.append(f"--chdir={shlex.quote(job.workdir)}")
    found.append("--requeue" if where.requeue else "--no-requeue")
    found.append("--open-mode=append")
    if job.is_elastic or job.spares:
        found.append("--no-kill")
    return [*found, *where.options]


def _machines(job: JobFile, cpus: int) -> list[str]:
    """Request MIN-MAX machines, so that an elastic job starts with those that are free.

    If --ntasks is set, Slurm allocates machines only for the minimum.
    """
    if job.min_machines == job.machines:
        return [f"--nodes={job.machines}", "--ntasks-per-node=1"]
    return [f"--nodes={job.min_machines}-{job.machines}", f"--mincpus={cpus}"]
