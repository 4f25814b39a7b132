"""Parses what a failing process printed.

A traceback starts with its header line. Its frames are indented. The first line without indentation is the exception,
and the lines after it belong to the message until another report begins. Python prints a chain of exceptions with the
oldest first, and one of two sentences between them. Only blocks with such a sentence between them form a chain: an
earlier traceback that the script logged is not part of it. What Python prints during shutdown ("Exception ignored in",
atexit, threads) is used only if there is nothing else.

Torch prefixes the lines with "[rank3]: " once a process group exists. Patterns are compiled on first use, so a job
without a failure spends no time on them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from launcher.output.lines import CUT, TRACEBACK_HEADER
from rendezvous.values.late_dataclass import dataclass

# --- tracebacks ------------------------------------------------------------------------------------

GROUP_HEADER = "+ Exception Group " + TRACEBACK_HEADER
MAX_LINES = 40
MAX_LINE_CHARS = 600
MAX_MESSAGE_LINES = 60
MAX_SHOWN_MESSAGE_LINES = 12
LAST_LINES = "last lines on stderr, which may show why:"
_JOINTS = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_AT_SHUTDOWN = ("Exception ignored in", "Exception in thread", "Error in atexit", "Error in sys.excepthook")
_OTHER_REPORTS = (
    *_AT_SHUTDOWN,
    *_JOINTS,
    "Fatal Python error:",
    "terminate called",
    "Exception raised from ",
    "[W",
    "[E",
    "[I",
    TRACEBACK_HEADER,
)
# What torch and the interpreter print at their end: reports, their indented lines, frames of C++, warnings.
_AFTER_AN_END = rf"{'|'.join(map(re.escape, _OTHER_REPORTS))}|\s|frame #|\S+:\d+: \w*Warning: "
_LOOSE_LINES_AFTER_CUT = 3  # the exception, and a warning or two at exit
_EXCEPTION = r"([^\W\d](?:[\w.]|<locals>)*)(?:: (.*)|:?)$"  # <locals>: a class that a function defines
_RANK = r"\[rank\d+\]:(?: |$)?"
_SYNTAX_ERRORS = ("SyntaxError:", "IndentationError:", "TabError:")


@dataclass(frozen=True, slots=True)
class Raised:
    """One exception as Python prints it; `parts` are the members of an exception group."""

    type: str
    message: str
    files: tuple[str, ...] = ()  # of its frames, outermost call first
    parts: tuple[Raised, ...] = ()

    @property
    def short_type(self) -> str:
        return self.type.rpartition(".")[2]

    @property
    def deepest_file(self) -> str:
        """The file whose code raised the exception; "" without a traceback."""
        return self.files[-1] if self.files else ""

    @property
    def headline(self) -> str:
        first = re.sub(r"^\[\S+\.(?:cc|cpp|hpp|h|cu):\d+\] ", "", first_line(self.message))
        if "Original Traceback (most recent" in self.message and first.startswith("Caught "):
            # The cause of a DataLoader worker's exception: torch puts the worker's traceback into the message.
            original = last_raised(self.message.replace("Original Traceback", "Traceback").split("\n"))
            where = first.partition(" in ")[2].rstrip(".")
            if original is None:
                return f"{self.short_type}: {first}"
            return f"{original.chain[-1].headline} (in {where})"
        line = f"{self.short_type}: {first}" if first else self.short_type
        return f"{line}; first exception of the group: {self.parts[0].headline}" if self.parts else line


@dataclass(frozen=True, slots=True)
class Crash:
    chain: tuple[Raised, ...]  # as printed: what started it first
    text: str  # the whole chain, bounded
    lines_after: int = 0  # without what torch and the interpreter print at their end


@dataclass(frozen=True, slots=True)
class _Block:
    start: int
    end: int
    shown_end: int  # the end of the shown part; a long message is truncated
    at_shutdown: bool
    raised: Raised


# A function of torch that we observe. Lines of its own follow, with more indentation.
_OUR_FRAME = re.compile(
    r'  File ".*/ddp/(?:telemetry/(?:observing|torch_marks|collective_marks)|launching/rank)\.py", line '
)


def first_line(text: str) -> str:
    return next((line.strip() for line in text.split("\n") if line.strip()), "")


def clean_lines(text: str) -> list[str]:
    """Remove colors, torch's rank prefix, our frames and the overwritten part of progress bars; truncate long lines.

    A traceback begins a line, even after text without a newline: a prompt, a progress bar.
    """
    text = re.sub(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07\x1b]*(?:\x07|\x1b\\)?)", "", text)
    lines = (line.rstrip().rpartition("\r")[2] for line in text.split("\n"))
    cleaned: list[str] = []
    is_ours = False
    for line in lines:
        text = re.sub(f"^{_RANK}", "", line)
        is_ours = bool(_OUR_FRAME.match(text)) or (is_ours and text.startswith("    "))
        if is_ours:
            continue
        before = text.removesuffix(TRACEBACK_HEADER)
        if before == text or not before.strip() or before.endswith(("Original ", "Exception Group ")):
            cleaned.append(text[:MAX_LINE_CHARS])
        else:
            cleaned += (re.sub(f"{_RANK}$", "", before)[:MAX_LINE_CHARS], TRACEBACK_HEADER)
    return _one_report(cleaned)


def _one_report(lines: list[str]) -> list[str]:
    """If text was removed in the middle, drop the lines before the gap, unless both parts can be one traceback."""
    if CUT not in lines:
        return lines
    after = lines[lines.index(CUT) + 1 :]
    loose = sum(1 for line in after if line and not line[0].isspace())
    return lines if loose <= _LOOSE_LINES_AFTER_CUT else after


def bounded(lines: list[str]) -> str:
    """Shorten a long traceback: keep its beginning (where it started) and its end (the exception)."""
    while lines and not lines[-1].strip():
        lines = lines[:-1]
    if len(lines) > MAX_LINES:
        head = 8
        left_out = len(lines) - MAX_LINES + 1
        lines = [*lines[:head], f"  ... {left_out} lines left out ...", *lines[head + left_out :]]
    return "\n".join(lines)


def last_raised(lines: list[str]) -> Crash | None:
    """The chain of exceptions at the end of `lines` (see `clean_lines`)."""
    blocks = _blocks(lines)
    if not blocks:
        return _bare_syntax_error(lines)
    last = max(range(len(blocks)), key=lambda i: (not blocks[i].at_shutdown, i))
    first = last
    while first > 0 and _joined(lines, blocks[first].start):
        first -= 1
    begin, end = blocks[first].start, blocks[last].end
    noise = {at for each in blocks[last + 1 :] for at in range(each.start, each.end)}
    after = len(said_in([line for at, line in enumerate(lines) if at >= end and at not in noise]))
    return Crash(
        tuple(b.raised for b in blocks[first : last + 1]),
        bounded(lines[begin : blocks[last].shown_end]),
        after,
    )


def said_in(lines: list[str]) -> list[str]:
    """The lines without those that torch and the interpreter print at their end."""
    return [line for line in lines if line and not re.match(_AFTER_AN_END, line)]


def last_lines(lines: list[str]) -> str:
    """What a rank that left by itself has printed last: a long message, an exception that it has handled."""
    said = said_in(lines)
    if not said:
        return ""
    end = len(lines) - lines[::-1].index(said[-1])
    shown = [line for line in lines[:end] if line][-MAX_LINES:]
    return "\n".join((LAST_LINES, *shown))


def last_native(lines: list[str]) -> Crash | None:
    """An uncaught C++ exception, or the interpreter's own "Fatal Python error"."""
    for at in range(len(lines) - 1, -1, -1):
        line = lines[at]
        if thrown := re.match(r"terminate called after throwing an instance of '(.+)'", line):
            return Crash((Raised(thrown[1], _what(lines, at + 1)),), bounded(lines[at : at + MAX_LINES]))
        if line.startswith("terminate called"):
            return Crash((Raised("terminate", line),), line)
    for at, line in enumerate(lines):
        if line.startswith("Fatal Python error: "):
            message = line.removeprefix("Fatal Python error: ")
            return Crash((Raised("Fatal Python error", message),), bounded(lines[at:]))
    return None


def _what(lines: list[str], start: int) -> str:
    message: list[str] = []
    for line in lines[start : start + MAX_MESSAGE_LINES]:
        if not message:
            if line.strip().startswith("what():"):
                message.append(line.strip().removeprefix("what():").strip())
        elif line.startswith(_OTHER_REPORTS):
            break
        else:
            message.append(line)
    return "\n".join(message).strip()


def _blocks(lines: list[str]) -> list[_Block]:
    blocks: list[_Block] = []
    for start, line in enumerate(lines):
        if line == TRACEBACK_HEADER:
            block = _plain_block(lines, start)
        elif line.strip() == GROUP_HEADER:
            block = _group_block(lines, start)
        else:
            continue
        if block is not None:
            blocks.append(block)
    return blocks


def _plain_block(lines: list[str], start: int) -> _Block | None:
    at = start + 1
    files: list[str] = []
    while at < len(lines) and (lines[at].startswith(" ") or not lines[at]):
        if frame := re.match(r'  File "(.+)", line \d+', lines[at]):
            files.append(frame[1])
        at += 1
    found = re.match(_EXCEPTION, lines[at]) if at < len(lines) else None
    if found is None:
        return None  # incomplete: the process ended while it printed
    end = _message_end(lines, at + 1)
    message = "\n".join([found[2] or "", *lines[at + 1 : end]]).strip()
    shown_end = end if "Original Traceback" in message else min(end, at + MAX_SHOWN_MESSAGE_LINES)
    return _Block(
        start, end, shown_end, _is_at_shutdown(lines, start), Raised(found[1], message, tuple(files))
    )


def _message_end(lines: list[str], at: int) -> int:
    limit = min(len(lines), at + MAX_MESSAGE_LINES)
    end = at
    while end < limit and not lines[end].startswith(_OTHER_REPORTS):
        end += 1
    while end > at and not lines[end - 1].strip():
        end -= 1
    return end


def _group_block(lines: list[str], start: int) -> _Block | None:
    """Members are indented. Of each member only its exception line is parsed."""
    end = start + 1
    raised: list[Raised] = []
    while end < len(lines) and (inside := re.match(r"\s+(?:\| ?|\+-[+-]*)(.*)$", lines[end])):
        found = None if inside[1].startswith("Traceback ") else re.match(_EXCEPTION, inside[1])
        if found is not None:
            raised.append(Raised(found[1], found[2] or ""))
        end += 1
    if not raised:
        return None
    group = Raised(raised[0].type, raised[0].message, parts=tuple(raised[1:]))
    return _Block(start, end, end, _is_at_shutdown(lines, start), group)


def _before(lines: list[str], start: int) -> str:
    return next((lines[i] for i in range(start - 1, max(start - 4, -1), -1) if lines[i].strip()), "")


def _joined(lines: list[str], start: int) -> bool:
    return _before(lines, start) in _JOINTS


def _is_at_shutdown(lines: list[str], start: int) -> bool:
    return _before(lines, start).startswith(_AT_SHUTDOWN)


def _bare_syntax_error(lines: list[str]) -> Crash | None:
    """A script that does not compile has no traceback header: File, source, caret, error."""
    for at in range(len(lines) - 1, 0, -1):
        if not lines[at].startswith(_SYNTAX_ERRORS):
            continue
        for start in range(at - 1, max(at - 6, -1), -1):
            if frame := re.match(r'  File "(.+)", line \d+', lines[start]):
                kind, _, message = lines[at].partition(": ")
                raised = Raised(kind.rstrip(":"), message, (frame[1],))
                return Crash((raised,), bounded(lines[start : at + 1]), len(said_in(lines[at + 1 :])))
    return None


# --- files that hide a module ----------------------------------------------------------------------
#
# Hints for a user's file that hides a module of the same name: `json.py` beside the script hides Python's json.
#
# The traceback shows it in two ways. A library imported a module from outside of all libraries, or found it without
# an attribute. Or the agent has found such a file (`RankEnd.hiding`). The second is needed where the frame that
# raised is in site-packages: a library that is too old for another one raises the same exception.

_WITHOUT = re.compile(r"module '(\w+)[\w.]*' has no attribute")
_FROM = re.compile(r"cannot import name '\w+' from (?:partially initialized module )?'(\w+)[\w.]*'")
_BELOW = re.compile(r"No module named '(\w+)\.|'(\w+)' is not a package")
_MOST_NAMES = 8  # a chain of exceptions names few modules; each name is looked for in some folders
_OURS = "ddp"


def modules_named(text: str) -> tuple[str, ...]:
    """Return the top-level modules in which an import or an attribute was not found, the last ones first."""
    found = [match for pattern in (_WITHOUT, _FROM, _BELOW) for match in pattern.finditer(text)]
    found.sort(key=lambda match: match.start(), reverse=True)
    names = [next(filter(None, match.groups())) for match in found]
    return tuple(dict.fromkeys(names))[:_MOST_NAMES]


def hint_of_hidden(raised: Raised, hiding: Mapping[str, str]) -> str:
    """`hiding`: the names of modules that the user's files hide, with these files."""
    if raised.short_type not in ("AttributeError", "ImportError", "ModuleNotFoundError"):
        return ""
    for name in modules_named(raised.message):
        if name in hiding:
            return f"{hiding[name]} hides {_kind_of_module(name)}: rename it"
    if raised.short_type == "AttributeError":
        return _without_attribute(raised)
    return _imported_by_library(raised) or _imported(raised.message)


def _without_attribute(raised: Raised) -> str:
    if re.search(rf"module '{_OURS}' has no attribute", raised.message):
        return _hides(_OURS)
    found = _WITHOUT.search(raised.message)
    deepest = raised.deepest_file
    is_pythons = "/lib/python" in deepest and not any(
        folder in deepest for folder in ("/site-packages/", "/dist-packages/")
    )
    return _hides(found[1], f"the module {found[1]} of Python") if found and is_pythons else ""


def _imported_by_library(raised: Raised) -> str:
    """A library has imported a module from outside of all libraries: it expected another one of that name."""
    found = re.search(r"cannot import name '\w+' from '(\w+)' \(([^)]*)\)", raised.message)
    hides = found is not None and "/lib/python" in raised.deepest_file and "/lib/python" not in found[2]
    return _hides(found[1], f"another module {found[1]}") if found and hides else ""


def _imported(message: str) -> str:
    if re.search(rf"from (partially initialized module )?'{_OURS}'|'{_OURS}\.'", message):
        return _hides(_OURS)
    if re.search(rf"No module named '{_OURS}\.|'{_OURS}' is not a package", message):
        return _hides(_OURS)
    hidden = re.search(r"'([^'.]+)' is not a package", message)
    return _hides(hidden[1], f"the package {hidden[1]}") if hidden else ""


def _hides(name: str, what: str = "") -> str:
    return (
        f"a file {name}.py or folder {name} beside the script or on PYTHONPATH hides {what or _kind_of_module(name)}: "
        "rename it"
    )


def _kind_of_module(name: str) -> str:
    return "the ddp library" if name == _OURS else f"the module {name} that others import"
