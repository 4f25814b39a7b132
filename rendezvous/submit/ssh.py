"""A job file as one command that starts every machine over ssh. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rendezvous.submit.job_file import BadJobFile

if TYPE_CHECKING:
    from rendezvous.submit.job_file import JobFile


def command(job: JobFile) -> list[str]:
    """Raises `BadJobFile`."""
    if not job.ssh.hosts:
        raise BadJobFile('[ssh]: which machines? write hosts = ["node1", "node2"]')
    if len(job.ssh.hosts) < job.machines:
        raise BadJobFile(f"[ssh]: {len(job.ssh.hosts)} hosts are too few for {job.machines} machines")
    sent = ["--send-env", ",".join(job.env)] if job.env else []
    return ["ddp-launch", *job.launch("--hosts", ",".join(job.ssh.hosts), *sent, *job.ssh.options)]
