"""A job file as one command that starts every machine over ssh. Pure."""

from __future__ import annotations

import shlex

from ddp_launch_wings.submit.job import BadJobFile, JobFile


def command(job: JobFile, run: str) -> list[str]:
    """The ddp-launch command. `run` is the job id. It does not contain values of environment
    variables, since `ps` shows commands.

    Raises `BadJobFile`.
    """
    if not job.ssh.hosts:
        raise BadJobFile('[ssh]: hosts is missing; write hosts = ["node1", "node2"]')
    if len(job.ssh.hosts) < job.machines:
        raise BadJobFile(
            f"[ssh]: {len(job.ssh.hosts)} hosts are too few for {job.machines} machines; add hosts"
        )
    for host in job.ssh.hosts:
        if not host or host.startswith("-") or any(c in host for c in ", \t\n"):
            raise BadJobFile(f"[ssh]: hosts: {host!r} is not a valid host name")
    words = ["--hosts", ",".join(job.ssh.hosts), "--rdzv-id", run]
    if job.env:
        words += ["--send-env", ",".join(job.env)]
    if job.rendezvous:
        words += ["--rendezvous", job.rendezvous]
    return ["ddp-launch", *job.launch(*words, *job.ssh.options)]


def render(job: JobFile, run: str) -> str:
    """The same command as a shell line."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in job.env.items()]
    place = f"cd {shlex.quote(job.workdir)} && " if job.workdir else ""
    return place + " ".join([*variables, shlex.join(command(job, run))]) + "\n"
