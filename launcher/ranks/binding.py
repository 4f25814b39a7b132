"""Decides which CPUs each local rank is bound to, from `--numa-binding` or `--cpu-affinity`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rendezvous.values.error_codes import Code
from rendezvous.values.late_dataclass import dataclass

if TYPE_CHECKING:
    from launcher.settings.spec import LaunchSpec


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
