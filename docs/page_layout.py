"""Write what is made of ddp/telemetry/contracts.py: the header of the C writer, and the phases in docs/status-page.md.

python docs/page_layout.py        # or `make layout`; a test holds them together
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ddp.telemetry import contracts  # noqa: E402

if TYPE_CHECKING:
    from ddp.telemetry.contracts import Field, PageBlock

HEADER = ROOT / "ddp/telemetry/_core/page_layout.h"
DOCS = ROOT / "docs/status-page.md"

# --- in C ------------------------------------------------------------------------------------------

_TYPES = {"Q": "uint64_t", "I": "uint32_t", "i": "int32_t", "s": "char"}
_MEMBERS = {"collective": "ring", "group": "groups"}  # of the whole page; others have the name of their block
_ATOMIC = {"pid"}
_TOP = """\
/* Made by docs/page_layout.py of ddp/telemetry/contracts.py, which says what each field means: `make layout`. */
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
"""


def header() -> str:
    return "\n".join([_TOP, *_constants(), "", *map(_struct, contracts.PAGE_BLOCKS), _page(), *_checks(), ""])


def _constants() -> list[str]:
    it = contracts
    blocks = {block.name: block.many for block in it.PAGE_BLOCKS}
    return [
        f"enum {{ PAGE = {it.SIZE}, PHASES = {it.ROOM_FOR_PHASES}, RING = {blocks['collective']}, "
        f"GROUPS = {blocks['group']}, BINS = {it.BINS}, KNOWN_GROUPS = {it.KNOWN_GROUPS} }};",
        f"enum phase {{ {', '.join(it.PHASES).upper()} }};",
        f"enum {{ NUMBERED = {it.NUMBERED}, REPEATS = {it.REPEATS}, UNCAUGHT = {it.UNCAUGHT} }}; "
        "/* flags of the totals */",
        f"enum {{ ASYNC = {it.ASYNC}, PAIR = {it.PAIR} }}; /* flags of a collective */",
        "",
        "typedef _Atomic uint64_t counter;",
    ]


def _struct(block: PageBlock) -> str:
    counter = ["    counter sequence;"] if block.has_counter else []
    return "\n".join([f"struct {block.name} {{", *counter, *map(_declaration, block.fields), "};"])


def _declaration(field: Field) -> str:
    kind = f"_Atomic {_TYPES[field.kind]}" if field.name in _ATOMIC else _TYPES[field.kind]
    many = f"[{field.many}]" if field.many > 1 else ""
    return f"    {kind} {field.name}{many};"


def _page() -> str:
    parts = [
        f"    _Alignas(64) struct {block.name} {_MEMBERS.get(block.name, block.name)}"
        f"{f'[{block.many}]' if block.many > 1 else ''};"
        for block in contracts.PAGE_BLOCKS
    ]
    return "\n".join(["struct page {", *parts, "};"])


def _checks() -> list[str]:
    """Both readers and writers compute places from the same fields; a compiler must not put space between them."""
    places = []
    for block in contracts.PAGE_BLOCKS:
        places.append(("page", _MEMBERS.get(block.name, block.name), block.at))
        at = block.first_field_at - block.at
        for field in block.fields:
            places.append((block.name, field.name, at))
            at += field.size
    checks = [f'_Static_assert(offsetof(struct {where}, {name}) == {at}, "");' for where, name, at in places]
    sizes = [
        f'_Static_assert(sizeof(struct {block.name}) == {block.slot}, "");'
        for block in contracts.PAGE_BLOCKS
        if block.slot
    ]
    return [*checks, *sizes, '_Static_assert(sizeof(struct page) <= PAGE, "");']


# --- in the documents ------------------------------------------------------------------------------


def phases() -> str:
    return ", ".join(f"{number} {name}" for number, name in enumerate(contracts.PHASES))


def with_phases(page: str) -> str:
    between = re.compile("(<!-- phases:begin -->\n).*?(\n<!-- phases:end -->)", re.DOTALL)
    page, changed = between.subn(lambda found: f"{found[1]}Phases: {phases()}.{found[2]}", page)
    assert changed == 1, "docs/status-page.md has no place for the phases"
    return page


if __name__ == "__main__":
    HEADER.write_text(header())
    DOCS.write_text(with_phases(DOCS.read_text()))
