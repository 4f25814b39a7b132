"""Starts zygotes, and removes processes and files that an ended zygote has left."""

from __future__ import annotations

import os
import resource
import signal

from launcher.ranks.worker_env import shared_env
from launcher.ranks.zygote import Zygote, obstacle_to_warm_start, store_command
from launcher.settings.spec import LaunchSpec
from launcher.template import cgroup, scratch, tree
from rendezvous.values.error_codes import Code
from rendezvous.values.late_dataclass import dataclass

_OPEN_FILES = 1 << 16  # at least, if the hard limit permits


class ZygoteStarter:
    """Starts zygotes for this agent: the first, and a replacement if one ends unexpectedly."""

    def __init__(self, spec: LaunchSpec) -> None:
        self._spec = spec
        self.binding = read_binding(spec)
        self.env = dict(os.environ) | shared_env(spec, os.environ, self.binding.omp_threads)
        self.obstacle = obstacle_to_warm_start(spec, self.env) if spec.warm_start else ""
        self.warm = spec.warm_start and not self.obstacle
        # Created by the zygote, which also cleans up after the agent.
        self.cgroup = cgroup.place(
            f"{os.getpid()}-{os.urandom(3).hex()}"
        )  # containers may share a parent group
        self.scratch = scratch.place(str(os.getpid()))
        self._signal_mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._open_files = resource.getrlimit(resource.RLIMIT_NOFILE)

    def start(self) -> Zygote:
        """Start a zygote with the limits and the signal mask that the agent started with: the ranks inherit them."""
        resource.setrlimit(resource.RLIMIT_NOFILE, self._open_files)
        try:
            return Zygote.start(
                self._spec, self.env, self.cgroup, self.scratch, self.warm, signal_mask=self._signal_mask
            )
        finally:
            self.permit_open_files()

    def store_command(self) -> tuple[str, ...]:
        return store_command(self._spec)

    def permit_open_files(self) -> None:
        """Raise the agent's own limit, which the ranks do not get."""
        soft, hard = self._open_files
        wanted = max(_OPEN_FILES, self._spec.open_files)
        wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))

    def end(self) -> None:
        """Clean up after the last zygote."""
        self.clean_up()
        scratch.remove(self.scratch)

    def clean_up(self) -> None:
        """Clean up after a zygote has ended. Keep only the scratch folder, for the ranks of the next one.

        Zygotes and ranks are in sessions of their own. What the agent itself has started, such as a command of
        `--on-event`, is in the agent's session, and is none of theirs.
        """
        if self.cgroup and not cgroup.remove(self.cgroup):
            cgroup.kill(self.cgroup)
        own = tree.is_in_session_of(os.getpid())
        tree.reap_all(os.getpid(), left_out=lambda pid: own(pid) or tree.is_cleaner(pid))
        if self.cgroup:
            cgroup.remove(self.cgroup)


# --- CPUs and GPUs of ranks ------------------------------------------------------------------------
#
# Decides which CPUs each local rank is bound to, from `--numa-binding` or `--cpu-affinity`.


@dataclass(frozen=True, slots=True)
class Binding:
    cpus: tuple[tuple[int, ...], ...] = ()  # by local rank; empty: not bound
    omp_threads: int = 0  # 0: the default, as in torchrun
    warnings: tuple[str, ...] = ()


def read_binding(spec: LaunchSpec) -> Binding:
    """Raise `UsageError` if this machine cannot do what the options ask."""
    if not spec.numa_binding and not spec.cpu_affinity:
        return Binding()
    from launcher.ranks.affinity import BindingError
    from launcher.settings.arguments import UsageError

    try:
        return _bound(spec)
    except BindingError as error:
        raise UsageError(str(error), code=Code.CANNOT_BIND_RANKS) from None


def _bound(spec: LaunchSpec) -> Binding:
    from launcher.ranks import affinity, topology

    gpus = topology.visible_gpus(os.environ)
    machine = topology.read_topology(gpus=gpus.addresses)
    if spec.numa_binding:
        mode, nproc = spec.numa_binding, spec.nproc
        shares = tuple(affinity.cpus_for_rank(machine, mode, rank, nproc) for rank in range(nproc))
        return Binding(shares, warnings=(gpus.warning,) if gpus.warning else ())
    even = affinity.share_cpus(machine, spec.nproc)
    # One number for all ranks: OpenMP reads it when torch is imported, which happens once per node.
    threads = min(affinity.omp_threads(cpus, machine) for cpus in even.cpus)
    return Binding(even.cpus, threads, (even.warning,) if even.warning else ())
