"""Draws a random training program from a seed. It is a value: the same one for every rank and for both classes.

A program has a model, the options of its wrapper, and operations. An operation is a dictionary with a `kind`; what it
leaves out has its plain value. Where ranks differ, a list has an entry for each rank.

Most programs use torch's class as its documentation permits. The others (`wild`) do what torch's class refuses, or what
makes its ranks wait for each other: there only the part that torch's class completes is compared.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

Op = dict[str, Any]

FACTORS = (0.0, -0.0, 1e-30, -1e-45, 1e-320, 1.0, 3.0, float("inf"), float("nan"))
BACKENDS = ("gloo", "gloo", "shm", "hier")


@dataclass(frozen=True)
class Layer:
    kind: str
    trained: bool = True
    tied_to: int | None = None
    sparse: bool = False


@dataclass(frozen=True)
class Program:
    seed: int
    world: int
    backend: str
    dtype: str
    layers: tuple[Layer, ...]
    options: dict[str, Any]
    wrappers: int
    shared: bool  # the wrappers have layers in common
    optimizer: str
    in_backward: bool
    hook: str
    wild: bool
    ops: tuple[Op, ...] = field(default=())


def draw(seed: int) -> Program:
    dice = random.Random(seed)
    world = 3 if dice.random() < 0.08 else 2
    wild = dice.random() < 0.12
    dtype = dice.choice(["float32"] * 5 + ["float64"] * 2 + ["bfloat16", "float16", "complex64"])
    options = _options(dice)
    in_backward = dice.random() < 0.02 and dtype == "float32"
    program = Program(
        seed,
        world,
        dice.choice(BACKENDS),
        dtype,
        _layers(
            dice, dtype, sparse=not options["gradient_as_bucket_view"] and dtype in ("float32", "float64")
        ),
        options,
        wrappers=2 if dice.random() < 0.2 and not in_backward else 1,
        shared=dice.random() < 0.4,
        optimizer=dice.choice(["sgd", "momentum", "adamw"]),
        in_backward=in_backward,
        hook=dice.choice(["", "", "", "", "", "own", "all_reduce", "fp16", "noop"]),
        wild=wild,
    )
    if any(layer.sparse for layer in program.layers) or dtype in ("complex64",) or in_backward:
        program = replace(program, hook="")
    if world > 2:  # a sum of three is rounded in another order over our transports
        if program.optimizer == "adamw":  # which makes a whole step of a rounding error
            program = replace(program, optimizer="sgd")
        if dtype in ("bfloat16", "float16"):
            program = replace(program, backend="gloo")
    ops = [_op(dice, program) for _ in range(dice.randint(3, 9))]
    return replace(program, ops=(*ops, {"kind": "step"}, {"kind": "zero"}, {"kind": "step"}))


def _options(dice: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {
        "bucket_cap_mb": dice.choice([25, 25, 0.00001, 0.00005, 0.0005, 0.01]),
        "gradient_as_bucket_view": dice.random() < 0.3,
        "find_unused_parameters": dice.random() < 0.35,
        "broadcast_buffers": dice.random() < 0.8,
        "static_graph": dice.random() < 0.12,
    }
    if options["static_graph"]:
        options["find_unused_parameters"] = False
    return options


def _layers(dice: random.Random, dtype: str, sparse: bool) -> tuple[Layer, ...]:
    kinds = ["linear"] * 4 + ["bare", "scale", "scalar", "column", "count", "sign"]
    kinds += [] if dtype == "complex64" else ["embedding", "embedding"]
    kinds += ["norm", "norm", "big", "picture"] if dtype in ("float32", "float64") else []
    layers = [Layer("linear")]
    for i in range(dice.randint(1, 6)):
        kind = dice.choice(kinds)
        tied = dice.random() < 0.1 and kind == "linear"
        of = dice.choice([j for j in range(i + 1) if layers[j].kind == "linear"]) if tied else None
        layers.append(
            Layer(kind, dice.random() < 0.85, of, kind == "embedding" and sparse and dice.random() < 0.15)
        )
    return tuple(layers)


def _op(dice: random.Random, program: Program) -> Op:
    weights = {
        "step": 40,
        "zero": 12,
        "optimize": 14,
        "none": 4,
        "hand": 3,
        "data": 4,
        "past": 7,
        "grad": 4,
        "infer": 4,
        "freeze": 4,
        "thaw": 3,
        "watch": 4,
        "buffer": 3,
        "hold": 3,
        "clip": 2,
        "rewrap": 1.5,
        "copy": 1,
        "mode": 2,
        "join": 2,
        "nothing": 1,
    }
    kind = dice.choices(list(weights), list(weights.values()))[0]
    op: Op = {"kind": kind}
    if program.wrappers > 1 and dice.random() < 0.5:
        op["wrapper"] = 1
    return {**op, **_DETAILS[kind](dice, program)} if kind in _DETAILS else op


def _may_leave_out(program: Program) -> bool:
    """Whether torch's class permits that a step does not use every parameter, or whether it is tried nevertheless."""
    return program.options["find_unused_parameters"] or program.wild


def _step(dice: random.Random, program: Program) -> Op:
    op: Op = {}
    n, world = len(program.layers), program.world
    if _may_leave_out(program) and dice.random() < 0.6:
        once = [dice.random() < 0.7 for _ in range(n)]
        each = [[True, *[dice.random() < 0.7 for _ in range(n - 1)]] for _ in range(world)]
        op["uses"] = each if dice.random() < 0.5 else [[True, *once[1:]]] * world
    if dice.random() < 0.25:
        op["touch"] = [
            [dice.randrange(n), dice.choice(FACTORS)] if dice.random() < 0.6 else None for _ in range(world)
        ]
    if dice.random() < 0.2:
        op["factor"] = [dice.choice(FACTORS) for _ in range(world)]
    if dice.random() < (0.05 if program.options["static_graph"] else 0.25):
        op["local"] = dice.choice(["all", "all", "forward", "backward", "nested"])
    if dice.random() < 0.2:
        op["forwards"] = dice.choice([2, 2, 3])
        op["order"] = dice.choice(["sum", "each", "reversed", "last"])
    if dice.random() < 0.12:
        op["again"] = True
    if dice.random() < 0.08 and not any(layer.sparse for layer in program.layers):
        op["penalty"] = True
    if dice.random() < 0.15:
        reentrant = program.options["static_graph"] or dice.random() < 0.2
        op["checkpoint"] = "reentrant" if reentrant else "plain"
    if dice.random() < 0.15:
        op["thread"] = True
    if dice.random() < 0.08:
        op["elsewhere"] = True
    if program.wrappers > 1 and dice.random() < 0.2:
        op["between"] = True
    if dice.random() < 0.3:
        op["form"] = dice.choice(["tuple", "dict", "object", "partly"])
    if dice.random() < 0.15:
        op["input"] = True
    if dice.random() < 0.1:
        op["frozen_between"] = [i for i in range(n) if dice.random() < 0.5] or list(range(n))
    if program.wild and dice.random() < 0.3:
        op["breaks"] = [dice.choice(["forward", "backward"]), dice.randrange(n), _ranks(dice, world)]
    if program.wild and dice.random() < 0.1:
        op["into"] = [dice.randrange(n)]
    return op


def _ranks(dice: random.Random, world: int) -> list[int]:
    return list(range(world)) if dice.random() < 0.7 else [dice.randrange(world)]


def _past(dice: random.Random, program: Program) -> Op:
    n = len(program.layers)
    op: Op = {"ranks": list(range(program.world)) if dice.random() < 0.4 else [dice.randrange(program.world)]}
    if dice.random() < 0.3:
        op["local"] = "all"
    if dice.random() < 0.5:
        op["uses"] = [[True, *[dice.random() < 0.6 for _ in range(n - 1)]]] * program.world
    if dice.random() < 0.5:
        op["zero"] = True
    if dice.random() < 0.2:
        op["thread"] = True
    return op


def _some(dice: random.Random, program: Program) -> Op:
    n = len(program.layers)
    return {"layers": [i for i in range(n) if dice.random() < 0.5] or [dice.randrange(n)]}


def _watch(dice: random.Random, program: Program) -> Op:
    hows = ["see", "double", "after", "clear", "train", "module", "forward"]
    # Otherwise torch's class lets a hook see gradients that it is sending.
    apart = not program.options["gradient_as_bucket_view"] and not any(each.sparse for each in program.layers)
    how = dice.choice([*hows, "others", "others", "layer, others"] if apart else hows)
    act = {"act": dice.choice(["see", "scale", "drop"])} if "others" in how else {}
    return {**_some(dice, program), "how": how, **act}


def _join(dice: random.Random, program: Program) -> Op:
    return {
        "inputs": [dice.randint(0, 3) for _ in range(program.world)],
        "initial": dice.random() < 0.5,
    }


_DETAILS: dict[str, Any] = {
    "step": _step,
    "past": _past,
    "zero": lambda dice, _program: {"set_to_none": dice.random() < 0.6, "by": dice.choice(["model", "own"])},
    "none": _some,
    "hand": _some,
    "data": _some,
    "freeze": lambda dice, program: _some(dice, program) if _may_leave_out(program) else {"layers": []},
    "thaw": _some,
    "watch": _watch,
    "hold": _some,
    "buffer": lambda dice, program: {"rank": dice.randrange(program.world)},
    "grad": lambda dice, _program: {"of": dice.choice(["parameters", "input"]), "kept": dice.random() < 0.3},
    "infer": lambda dice, _program: {"how": dice.choice(["no_grad", "unused", "inference"])},
    "mode": lambda dice, _program: {"train": dice.random() < 0.6},
    "join": _join,
}
