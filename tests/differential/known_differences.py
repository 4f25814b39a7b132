"""The intended differences between the two classes. Each one refers to words of docs/ddp.md, which a test looks up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from drawn_program import Program


@dataclass(frozen=True)
class Known:
    """Ours is right where torch's class raises these words, or where a program does what `does` finds in it.

    `one_step_late`: torch's class raises in the next forward only.
    """

    page: str
    torch_raises: str = ""
    does: Callable[[Program, int], bool] | None = None
    one_step_late: bool = False


def _hides_its_graph(program: Program, at: int) -> bool:
    """A static graph, where a step before this one had outputs that torch does not see, or no forward at all."""
    before = program.ops[: at + 1]
    hidden = any(op.get("form") == "object" or op["kind"] == "past" for op in before)
    return program.options["static_graph"] and hidden


def _replaces_memory(program: Program, at: int) -> bool:
    replaced = any(op["kind"] == "data" for op in program.ops[:at])
    return program.options["gradient_as_bucket_view"] and replaced


def _ends_early(program: Program, at: int) -> bool:
    """A backward that does not reach all parameters, with bucket views or a sparse gradient: torch's class divides at
    once what arrives.
    """
    op, options = program.ops[at], program.options
    some = any(not all(used) for used in op.get("uses", ())) or "into" in op or "breaks" in op
    at_once = options["gradient_as_bucket_view"] or any(layer.sparse for layer in program.layers)
    return at_once and not options["find_unused_parameters"] and some


def _joins_at_first(program: Program, at: int) -> bool:
    """A rank without input in its first step tells the others which parameters it has used."""
    steps = [op for op in program.ops[: at + 1] if op["kind"] in ("step", "join")]
    joins = bool(steps) and steps[0]["kind"] == "join" and 0 in steps[0]["inputs"]
    return program.options["find_unused_parameters"] and joins


def _shares(program: Program, _at: int) -> bool:
    sparse = any(layer.sparse for layer in program.layers)
    special = sparse or program.options["static_graph"] or program.options["gradient_as_bucket_view"]
    return special and program.shared and program.wrappers > 1


def _shares_interrupted(program: Program, at: int) -> bool:
    """Whether a backward of one of two wrappers that share layers has broken: a later one of the other completes it."""
    broken = any("breaks" in op for op in program.ops[:at])
    return broken and program.shared and program.wrappers > 1


KNOWN = (
    Known("two wrappers that share layers, with", does=_shares),
    Known("two wrappers that share layers, and an exception", does=_shares_interrupted),
    Known("an optimizer in the backward pass on a CPU", "Cannot access accelerator device"),
    Known("`Encountered gradient which is undefined`", "Encountered gradient which is undefined"),
    Known("an unused sparse embedding", "Expected sparse gradient to be defined"),
    Known("`join()` with a sparse embedding", "Expected a proper Tensor but got None"),
    Known("an output inside of an object that torch does not search", does=_hides_its_graph),
    Known("`p.grad.data = ...`", does=_replaces_memory),
    Known("which it has divided by the number of ranks", does=_ends_early),
    Known("a rank that has no input for its first step", does=_joins_at_first),
    Known("the next forward raises an error", "Expected to have finished reduction", one_step_late=True),
)


def known(program: Program, at: int, end: int, messages: list[str]) -> str:
    """-> words of the page, or "" if the difference is not intended. `end`: where torch's class raises."""
    for each in KNOWN:
        if each.does is not None and at >= 0 and each.does(program, at):
            return each.page
        raised = each.torch_raises and any(each.torch_raises in message for message in messages)
        if raised and at >= (_step_before(program, end) if each.one_step_late else end):
            # In the operation where torch's class raises, ours has to raise as well.
            return "" if each.one_step_late and at >= end else each.page
    return ""


def _step_before(program: Program, end: int) -> int:
    """The last operation before `end` that computed gradients with the same wrapper."""
    wrapper = program.ops[end].get("wrapper", 0)
    kinds = ("step", "grad", "join")
    steps = [i for i, op in enumerate(program.ops[:end]) if op["kind"] in kinds]
    return max((i for i in steps if program.ops[i].get("wrapper", 0) == wrapper), default=-1)
