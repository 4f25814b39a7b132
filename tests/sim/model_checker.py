"""Explores all states that a model can reach, breadth first, and checks that from each of them the job can end.

A state is kept as a hash of 64 bits: two of a million states are the same by chance once in 40 million runs. The first
story that breaks a property is also one of the shortest.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim_model import World


class Broken(AssertionError):
    def __init__(self, words: str, story: list[str]) -> None:
        super().__init__("\n".join([words, *story]))
        self.story = story


@dataclass(frozen=True)
class Explored:
    states: int
    transitions: int
    ends: int
    is_complete: bool


class _Graph:
    """The parent of each state, and the transitions that happen by themselves, backwards."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.parents, self.words = array("l"), array("l")
        self.sources, self.targets = array("l"), array("l")
        self._names: dict[str, int] = {}

    def number(self, key: int, parent: int, words: str) -> tuple[int, bool]:
        found = self.numbers.setdefault(key, len(self.parents))
        is_new = found == len(self.parents)
        if is_new:
            self.parents.append(parent)
            self.words.append(self._names.setdefault(words, len(self._names)))
        return found, is_new

    def story(self, state: int) -> list[str]:
        names, told = list(self._names), []
        while state > 0:
            told.append(names[self.words[state]])
            state = self.parents[state]
        return told[::-1]

    def cannot_reach(self, ends: list[int]) -> int | None:
        """The first state from which no transition that happens by itself leads to one of these."""
        before: dict[int, list[int]] = {}
        for source, target in zip(self.sources, self.targets, strict=True):
            before.setdefault(target, []).append(source)
        can, todo = set(ends), list(ends)
        while todo:
            for source in before.get(todo.pop(), ()):
                if source not in can:
                    can.add(source)
                    todo.append(source)
        return next((state for state in range(len(self.parents)) if state not in can), None)


def explore(first: World, most_states: int | None = None) -> Explored:
    """Raises `Broken`. Beyond `most_states`, states are not explored further, nor must an end be reachable."""
    graph = _Graph()
    graph.number(first.key(), -1, "")
    todo, ends, transitions = deque([(0, first)]), [], 0
    while todo and (most_states is None or len(graph.parents) < most_states):
        here, world = todo.popleft()
        if world.has_ended():
            ends.append(here)
            continue
        for is_chance, actions in ((False, world.actions()), (True, world.faults()), (True, world.orders())):
            for words, act in actions:
                try:
                    after = act()
                except AssertionError as error:
                    raise Broken(str(error), [*graph.story(here), words]) from error
                transitions += 1
                there, is_new = graph.number(after.key(), here, words)
                if is_new:
                    todo.append((there, after))
                if not is_chance:
                    graph.sources.append(here)
                    graph.targets.append(there)
    if not todo and (stuck := graph.cannot_reach(ends)) is not None:
        raise Broken("from here, the job never ends by itself", graph.story(stuck))
    return Explored(len(graph.parents), transitions, len(ends), not todo)
