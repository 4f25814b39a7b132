"""The contents of a job file as dataclasses; see `job_file` for the format."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Resources:
    cpu: str = "4"
    memory: str = "8Gi"
    gpus: int = 0
    gpu_resource: str = "nvidia.com/gpu"
    shm: str = ""  # size of /dev/shm; "": limited by memory only
    extra: dict[str, str] = field(default_factory=dict)  # "rdma/hca" = 1; Kubernetes only


@dataclass(frozen=True, slots=True)
class Volume:
    path: str
    claim: str = ""  # a PersistentVolumeClaim
    config_map: str = ""  # each of its keys is a file
    secret: str = ""
    host_path: str = ""  # a folder of the machine
    size: str = "1Gi"  # without any of these: an empty folder of this size, deleted with the pod
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Kubernetes:
    kind: str = "job"
    context: str = ""  # of the user's kubeconfig; "": the current one
    namespace: str = "default"
    rendezvous: str = ""  # the service for this cluster; "": the `rendezvous` of the job
    queue: str = ""  # of Kueue
    priority_class: str = ""
    scheduler: str = ""
    service_account: str = ""
    token_secret: str = ""  # with the key `token`
    tls_secret: str = (
        ""  # with ca.crt, and with tls.crt and tls.key if the service requires client certificates
    )
    secret_env: dict[str, str] = field(default_factory=dict)  # NAME = "SECRET/KEY"
    grace_s: int = 120  # from SIGTERM to SIGKILL; must be long enough for a checkpoint
    replace: int = 10  # how many times a pod of one index is replaced
    wait: str = "1d"  # how long pods wait for pods that are not scheduled yet
    deadline_s: int = 0  # the job is ended after this time; 0: never
    keep_s: int = 86_400  # how long a finished job is kept
    labels: dict[str, str] = field(default_factory=dict)  # of the job and its pods, as annotations
    annotations: dict[str, str] = field(default_factory=dict)
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: list[dict[str, Any]] = field(default_factory=list)
    apart: str = ""  # anti-affinity: the key of a node label; pods are spread evenly over its values
    together: str = ""  # affinity: the key of a node label; pods prefer nodes with the same value
    runtime_class: str = ""
    user: int = 10_001  # the user id of the job; the group id is the same
    fenced: bool = True  # a network policy: only the pods of the job can reach the ports of its ranks
    host_network: bool = False
    capabilities: list[str] = field(default_factory=list)  # IPC_LOCK, where RDMA asks for it
    image_pull_secrets: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Slurm:
    partition: str = ""
    account: str = ""
    qos: str = ""
    time: str = ""
    reservation: str = ""
    constraint: str = ""
    exclude: str = ""
    gres: str = ""  # replaces [resources] gpus
    array: str = ""  # a job array, each element runs this job
    requeue: bool = True
    signal_s: int = 120  # how long before the time limit the ranks are asked for a checkpoint
    setup: list[str] = field(default_factory=list)  # lines of shell: modules, an environment
    options: list[str] = field(default_factory=list)  # more #SBATCH options


@dataclass(frozen=True, slots=True)
class Ssh:
    hosts: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)  # more options of ddp-launch


@dataclass(frozen=True, slots=True)
class JobFile:
    name: str
    script: tuple[str, ...]
    image: str = ""
    workdir: str = ""
    nodes: str = "1"
    ranks_per_node: str = "auto"
    spares: int = 0
    max_restarts: str = "3"
    options: tuple[str, ...] = ()
    rendezvous: str = ""
    resources: Resources = Resources()
    env: dict[str, str] = field(default_factory=dict)
    volumes: tuple[Volume, ...] = ()
    kubernetes: Kubernetes = Kubernetes()
    slurm: Slurm = Slurm()
    ssh: Ssh = Ssh()

    @property
    def min_machines(self) -> int:
        """The smallest number of machines with which the job can continue."""
        return int(self.nodes.partition(":")[0])

    @property
    def machines(self) -> int:
        """The number of machines to request: the largest world and the spares."""
        return int(self.nodes.rpartition(":")[2]) + self.spares

    @property
    def is_elastic(self) -> bool:
        return ":" in self.nodes

    def launch(self, *more: str) -> list[str]:
        """The arguments of `ddp-launch`, including the script and its arguments."""
        words = ["--nnodes", self.nodes, "--nproc-per-node", self.ranks_per_node]
        words += ["--max-restarts", self.max_restarts]
        if self.spares:
            words += ["--spares", str(self.spares)]
        return [*words, *more, *self.options, *self.script]
