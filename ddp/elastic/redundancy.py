"""Which redundancy parts of commits have in the memory of other nodes: the text of the option, and what fits a job.

    none        nothing: the parts of a lost node are read from disk
    copies:N    N other nodes have a copy of each part; N nodes can be lost at once
    code:K+M    a code over groups of K + M nodes or more; M nodes of each group can be lost at once
    auto        what fits the number of nodes: a copy, or a code that needs less memory

Copies are the code with K = 1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ddp.elastic.erasure_code import MOST
from ddp.telemetry.coded import WrongValue

_FORM = re.compile(r"copies:(\d+)|code:(\d+)\+(\d+)")
_USE = "use none, auto, copies:N (for example copies:1) or code:K+M (for example code:6+2)"
_WIDE = 8  # nodes in a group, with auto


@dataclass(frozen=True, slots=True)
class Code:
    k: int
    m: int

    @property
    def n_nodes(self) -> int:
        return self.k + self.m

    def __str__(self) -> str:
        return f"copies:{self.m}" if self.k == 1 else f"code:{self.k}+{self.m}"


@dataclass(frozen=True, slots=True)
class Redundancy:
    """What was asked for. `code` is None if it depends on the number of nodes."""

    code: Code | None


def parse(text: str) -> Redundancy | None:
    """None: no redundancy. Raise ValueError if the text has no meaning."""
    if text in ("", "none"):
        return None
    if text == "auto":
        return Redundancy(None)
    found = _FORM.fullmatch(text)
    if found is None:
        raise WrongValue(f"invalid redundancy {text!r}: {_USE}")
    copies, k, m = (int(each) if each else 0 for each in found.groups())
    code = Code(1, copies) if found[1] else Code(k, m)
    if code.k < 1 or code.m < 1:
        raise WrongValue(f"invalid redundancy {text!r}: numbers begin at 1; {_USE}")
    if code.n_nodes > MOST:
        raise WrongValue(f"invalid redundancy {text!r}: a group has at most {MOST} nodes")
    return Redundancy(code)


def fitting(asked: Redundancy, n_nodes: int) -> tuple[Code | None, str]:
    """Return the code for a job on so many nodes, and what to tell the user if it is not the one that was asked for."""
    if n_nodes < 2:
        return None, (
            "all ranks of a State are on one node, so no other node can keep parts of its commits. If the node is "
            "lost, the State resumes from disk. Use State(folder=...), or more nodes"
        )
    code = asked.code or _automatic(n_nodes)
    if code.n_nodes <= n_nodes:
        return code, ""
    m = min(code.m, n_nodes - 1)
    less = Code(n_nodes - m, m)
    return less, (
        f"{code} needs {code.n_nodes} nodes, and the ranks of a State are on {n_nodes}: commits are kept with {less}, "
        f"which survives the loss of {_nodes(m)} and needs {1 + m / less.k:.2f} times the memory. Use --redundancy "
        f"{less} to silence this, or start at least {code.n_nodes} nodes"
    )


def _automatic(n_nodes: int) -> Code:
    if n_nodes >= _WIDE:
        return Code(_WIDE - 2, 2)
    return Code(max(1, n_nodes - 1), 1) if n_nodes > 3 else Code(1, 1)


def _nodes(n: int) -> str:
    return "1 node" if n == 1 else f"{n} nodes"
