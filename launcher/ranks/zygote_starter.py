"""What a zygote is started with, and what is cleared away after it."""

from __future__ import annotations

import os
import resource
import signal
from typing import TYPE_CHECKING

from launcher.ranks.binding import read_binding
from launcher.ranks.worker_env import shared_env
from launcher.ranks.zygote import Zygote, obstacle_to_warm_start
from launcher.template import cgroup, scratch, tree

if TYPE_CHECKING:
    from launcher.settings.spec import LaunchSpec

_OPEN_FILES = 1 << 16  # at least, where that is allowed


class ZygoteStarter:
    """Starts zygotes for this agent: the first, and another should one die."""

    def __init__(self, spec: LaunchSpec) -> None:
        self._spec = spec
        self.binding = read_binding(spec)
        self._env = dict(os.environ) | shared_env(spec, os.environ, self.binding.omp_threads)
        self.obstacle = obstacle_to_warm_start(spec, self._env) if spec.warm_start else ""
        self.warm = spec.warm_start and not self.obstacle
        # Made by the zygote, which cleans up after us.
        self.cgroup = cgroup.place(f"ddp-launch-{os.getpid()}")
        self.scratch = scratch.place(str(os.getpid()))
        self._signal_mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._open_files = resource.getrlimit(resource.RLIMIT_NOFILE)

    def start(self) -> Zygote:
        """With the limits and the signal mask that the agent was started with: ranks are to find those."""
        resource.setrlimit(resource.RLIMIT_NOFILE, self._open_files)
        try:
            return Zygote.start(
                self._spec, self._env, self.cgroup, self.scratch, self.warm, self._signal_mask
            )
        finally:
            soft, hard = self._open_files
            wanted = max(_OPEN_FILES, self._spec.open_files)
            wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))

    def end(self) -> None:
        """After the last zygote."""
        self.clean_up()
        scratch.remove(self.scratch)

    def clean_up(self) -> None:
        """After a zygote has ended: nothing of ours may be left, but for what the next one's ranks may use."""
        if self.cgroup and not cgroup.remove(self.cgroup):
            cgroup.kill(self.cgroup)
        tree.reap_all(os.getpid())
        if self.cgroup:
            cgroup.remove(self.cgroup)
