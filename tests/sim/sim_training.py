"""The steps that the ranks of all nodes finish together: who takes part in one, and from which step it goes on.

The machines never read this. A step is finished as soon as every rank of a world trains in it. In the first step of a
world, ranks that were paused go on from their own step, and new ranks get that of the others. In a world in which no
rank has taken a step, they go on from what was finished last (a checkpoint).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sim_violation import require

if TYPE_CHECKING:
    from sim_agent import SimAgent
    from sim_world import SimWorld

_STEP_S = 0.25


@dataclass(slots=True)
class Process:
    """The process of one rank."""

    joins: bool = False  # it was told that others continue
    kept: bool = False  # it continues in this generation
    step: int = 0  # that it has finished


class Training:
    def __init__(self, world: SimWorld) -> None:
        self._world = world
        self.step = 0  # the last one that was finished, and where
        self.generation = 0
        self._nodes: frozenset[str] = frozenset()
        self.broken: set[int] = set()  # generations in which a rank that was to continue has ended
        self.kept = 0  # processes that have gone on in another generation
        world.clock.after(_STEP_S, self._tick)

    def _tick(self) -> None:
        for generation in sorted({agent.ranks.generation for agent in self._world.agents if agent.is_alive}):
            if self.is_complete(generation):
                self._finish_step(generation, self._agents(generation))
        self._world.clock.after(_STEP_S, self._tick)

    def is_complete(self, generation: int) -> bool:
        """Whether every rank of this world trains."""
        agents = self._agents(generation)
        sizes = {agent.ranks.assignment.world_size for agent in agents if agent.ranks.assignment is not None}
        return sizes == {sum(len(agent.ranks.training()) for agent in agents)}

    def _agents(self, generation: int) -> list[SimAgent]:
        up = (
            agent for agent in self._world.agents if agent.is_alive and agent.ranks.generation == generation
        )
        return [agent for agent in up if agent.ranks.training()]

    def _finish_step(self, generation: int, agents: list[SimAgent]) -> None:
        processes = [process for agent in agents for process in agent.ranks.training()]
        nodes = frozenset(agent.node for agent in agents)
        if generation < self.generation:
            require(not nodes & self._nodes, f"{generation} finishes a step after {self.generation} did")
            return  # all its nodes are cut off, and others have taken their place
        if generation > self.generation and not self._resumes(generation, processes):
            return
        self.generation, self._nodes, self.step = generation, nodes, self.step + 1
        for process in processes:
            process.step = self.step

    def _resumes(self, generation: int, processes: list[Process]) -> bool:
        kept = [process for process in processes if process.kept]
        if kept:
            require(
                all(p.kept or p.joins for p in processes),
                f"ranks start {generation} beside ranks that continue",
            )
            newest = max(process.step for process in kept)
            require(
                newest in (0, self.step),
                f"{generation} goes on from step {newest}, and {self.step} was finished",
            )
            return True
        if any(process.joins for process in processes):
            require(generation in self.broken, f"new ranks of {generation} join, and nobody continues")
            return False
        return True
