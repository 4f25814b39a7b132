"""A real Slurm on the hosts of a lab: the last host controls and submits, a slurmd runs on each of the others."""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import TYPE_CHECKING, Any

from lab_host import eventually

from rendezvous.access import secret

if TYPE_CHECKING:
    from pathlib import Path

    from lab_host import Host, Process
    from lab_network import Lab

_SBIN = "/usr/sbin:/usr/local/sbin:/sbin:" + os.environ.get("PATH", "")
_START_S = 60.0

_CONF = """
ClusterName=lab
SlurmctldHost={control}({address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=10
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,requeue_delay=0
ReturnToService=2
SlurmdTimeout=30
KillWait=30
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
JobRequeue=1
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=accelerator
PartitionName=lab Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def what_is_missing() -> str:
    """Why there can be no Slurm here; "" where there can."""
    needed = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
    missing = [name for name in needed if shutil.which(name, path=_SBIN) is None]
    return f"no {', '.join(missing)} on this machine" if missing else ""


class SlurmCluster:
    def __init__(self, lab: Lab, folder: Path) -> None:
        """The folder is one that everybody may look into: munge goes by that."""
        self.lab = lab
        *self.nodes, self.control = lab.hosts
        self.folder = folder
        (self.folder / "state").mkdir()
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "DDP_", "PET_"))}
        self.env |= {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "OMP_NUM_THREADS": "1",
            "LC_ALL": "C.UTF-8",
            "DDP_RENDEZVOUS_SECRET": secret.make(),  # srun takes it to all nodes
        }
        self._write_conf()
        self._start_munge()
        self._daemon(self.control, "slurmctld", "-D", "-c", "-f", self.env["SLURM_CONF"])
        for node in self.nodes:
            (self.folder / f"spool-{node}").mkdir()
            self._daemon(node, "slurmd", "-D", "-f", self.env["SLURM_CONF"], "-N", node.name)
        try:
            eventually(self._all_idle, _START_S, "all nodes are idle")
        except AssertionError as error:
            logs = "\n".join(path.read_text()[-2000:] for path in sorted(self.folder.glob("*.log")))
            raise AssertionError(f"{error}\n{logs}") from None

    def _all_idle(self) -> bool:
        return self.ask("sinfo", "-h", "-t", "idle", "-o", "%D") == str(len(self.nodes))

    def _write_conf(self) -> None:
        rows = [
            f"NodeName={node} NodeHostname={node} NodeAddr={node.address} CPUs=2 RealMemory=1000 "
            "Gres=accelerator:2 State=UNKNOWN"
            for node in self.nodes
        ]
        told = {"control": self.control, "address": self.control.address, "folder": self.folder}
        (self.folder / "gres.conf").write_text("Name=accelerator Count=2\n")  # of no device
        (self.folder / "slurm.conf").write_text(_CONF.format(**told, nodes="\n".join(rows)))

    def _start_munge(self) -> None:
        """One for all hosts: they share this machine's file system, and so its socket."""
        key, socket = self.folder / "munge.key", self.folder / "munge.sock"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        files = (
            f"--{name}={self.folder}/munge.{name.split('-')[0]}"
            for name in ("pid-file", "log-file", "seed-file")
        )
        options = ("--force", "--foreground", f"--key-file={key}", f"--socket={socket}", *files)
        self._daemon(self.control, "munged", *options)
        eventually(socket.exists, what="munge answers")

    def _daemon(self, host: Host, name: str, *words: str) -> None:
        path = shutil.which(name, path=_SBIN)
        assert path is not None
        with (self.folder / f"{name}-{host}.out").open("wb") as out:
            host.start(path, *words, env=self.env, stdout=out, stderr=out)

    # --- what people do ----------------------------------------------------------------------------

    def ask(self, *command: str) -> str:
        """What it printed; "" when it failed."""
        with tempfile.TemporaryFile() as out:
            process = self.control.start(*command, env=self.env, stdout=out, stderr=out)
            failed = process.wait(_START_S) != 0
            out.seek(0)
            return "" if failed else out.read().decode().strip()

    def start(self, *command: str, **streams: Any) -> Process:
        return self.control.start(*command, env=self.env, **streams)

    def submit(self, script: Path, *options: str) -> str:
        """The job's number."""
        number = self.ask("sbatch", "--parsable", *options, str(script))
        assert number.isdigit(), f"sbatch did not take {script}: {number}"
        return number

    def about(self, job: str, name: str) -> str:
        """One field of `scontrol show job`."""
        words = self.ask("scontrol", "show", "job", job).split()
        return next((word.partition("=")[2] for word in words if word.startswith(f"{name}=")), "")
