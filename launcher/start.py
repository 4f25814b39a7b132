"""From a checked spec to a running agent: the zygote first, so that it imports torch while the agent gets ready."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from launcher.binding import read_binding
from launcher.template import cgroup, tree
from launcher.worker_env import shared_env
from launcher.zygote import Zygote, obstacle_to_warm_start

if TYPE_CHECKING:
    from launcher.spec import LaunchSpec


class ZygoteStarter:
    """Starts zygotes for this agent: the first, and another should one die."""

    def __init__(self, spec: LaunchSpec) -> None:
        self._spec = spec
        self.binding = read_binding(spec)
        self._env = dict(os.environ) | shared_env(spec, os.environ, self.binding.omp_threads)
        self.obstacle = obstacle_to_warm_start(spec, self._env) if spec.warm_start else ""
        self.warm = spec.warm_start and not self.obstacle
        self.cgroup = cgroup.create(f"ddp-launch-{os.getpid()}")

    def start(self) -> Zygote:
        return Zygote.start(self._spec, self._env, self.cgroup, self.warm)

    def clean_up(self) -> None:
        """After the last zygote has ended: nothing of ours may be left, not even a folder."""
        if self.cgroup and not cgroup.remove(self.cgroup):
            cgroup.kill(self.cgroup)
            tree.reap_all(os.getpid())
            cgroup.remove(self.cgroup)


def run_agent(spec: LaunchSpec) -> int:
    tree.become_subreaper()
    starter = ZygoteStarter(spec)
    zygote = starter.start()
    import asyncio

    from launcher.agent import Agent

    return asyncio.run(Agent(spec, starter, zygote).run())
