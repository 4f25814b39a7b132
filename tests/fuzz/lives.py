"""Changes the life of a job as its agents tell it, message by message and field by field.

Bytes that are changed blindly are hardly ever a message still. Here a message stays one, and says something else:
another number at the edge of its range, another name, one part more or less; or it comes twice, or not at all.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from rendezvous.codec import BadMessage, from_agent_bytes, read_from_agent
from rendezvous.values.events import FromAgent
from rendezvous.values.types import AgentId

if TYPE_CHECKING:
    from random import Random

AGENTS = tuple(AgentId(name, "1") for name in "abcd")
WAITING = 4  # the bit of a turn that says: nobody speaks, a deadline is due
_EDGES: dict[Any, tuple[Any, ...]] = {
    bool: (False, True),
    int: (0, 1, 2, 3, -1, 100, 4096, 2**31 - 1, -(2**31)),
    float: (0.0, 1.0, 5.0, -1.0, 1e-300, 1e300, -1e300),
    str: ("", "a", "b", "0", "0-1", "0-6/2", "0-999999999", "1/0", "all_reduce", "\0", "\u2028", "x" * 200),
    AgentId: AGENTS,
}


def cut_up(data: bytes) -> list[tuple[int, bytes]]:
    """Many messages in one: a byte of choice (who speaks, how long after), two bytes of length, a message."""
    parts, at = [], 0
    while at + 3 <= len(data):
        size = int.from_bytes(data[at + 1 : at + 3], "big")
        parts.append((data[at], data[at + 3 : at + 3 + size]))
        at += 3 + size
    return parts


def joined_up(parts: list[tuple[int, bytes]]) -> bytes:
    return b"".join(bytes([choice]) + len(part).to_bytes(2, "big") + part for choice, part in parts)


def changed(data: bytes, chance: Random) -> bytes:
    parts = cut_up(data)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(parts) + 1)
        match chance.randrange(6):
            case 0:
                parts.insert(at, _another(chance))
            case 1:
                parts.insert(at, (chance.choice([4, 0x44, 0xF4]), b""))
            case 2 if parts:
                parts.insert(at, chance.choice(parts))
            case 3 if parts:
                parts.pop(at - 1)
            case _ if parts:
                parts[at - 1] = _reworded(*parts[at - 1], chance)
    return joined_up(parts)


def _another(chance: Random) -> tuple[int, bytes]:
    who = chance.randrange(len(AGENTS))
    message = replace(_value(chance.choice(get_args(FromAgent)), chance), agent=AGENTS[who])
    if hasattr(message, "generation") and chance.random() < 0.8:
        message = replace(message, generation=1)
    return who | chance.choice([0, 0x10, 0x40, 0xF0]), _written(message, b"")


def _reworded(choice: int, part: bytes, chance: Random) -> tuple[int, bytes]:
    try:
        message = read_from_agent(part, AGENTS[choice & 3])
    except BadMessage:
        return _another(chance)
    return choice, _written(_tweaked(message, chance), part)


def _written(message: Any, otherwise: bytes) -> bytes:
    try:
        return from_agent_bytes(message)
    except BadMessage:  # a number that the schema has no room for
        return otherwise


def _tweaked(value: Any, chance: Random) -> Any:
    """One field of it, or of something in it."""
    names = [each.name for each in fields(value) if each.name != "agent"]
    if not names:
        return value
    name = chance.choice(names)
    old, hint = getattr(value, name), get_type_hints(type(value))[name]
    if is_dataclass(old) and chance.random() < 0.8:
        return replace(value, **{name: _tweaked(old, chance)})
    if isinstance(old, tuple) and old and is_dataclass(old[0]) and chance.random() < 0.8:
        at = chance.randrange(len(old))
        return replace(value, **{name: (*old[:at], _tweaked(old[at], chance), *old[at + 1 :])})
    return replace(value, **{name: _value(hint, chance)})


def _value(hint: Any, chance: Random) -> Any:
    if hint in _EDGES:
        return chance.choice(_EDGES[hint])
    parts = get_args(hint)
    if get_origin(hint) is tuple:
        return tuple(_value(parts[0], chance) for _ in range(chance.randrange(4)))
    if get_origin(hint) is UnionType:
        (inner,) = (part for part in parts if part is not NoneType)
        return None if chance.random() < 0.4 else _value(inner, chance)
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        return hint(**{each.name: _value(hints[each.name], chance) for each in fields(hint)})
    return chance.choice(list(hint))
