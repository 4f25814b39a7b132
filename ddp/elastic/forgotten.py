"""What the training uses and a State does not have: looked for once, at the first commit.

Three things are found: objects that a failure would set back although they are not in the State, variables of the
function that trains which would begin again, and files of the script that ranks have read in different versions.
"""

from __future__ import annotations

import dis
import functools
import inspect
import logging
import os
import sys
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data.distributed import DistributedSampler

from ddp.elastic.own import PerRank
from ddp.elastic.sampler import ElasticSampler
from ddp.telemetry.observing import instances_of

log = logging.getLogger("ddp.elastic")
_OBJECTS = (
    "ddp.elastic: not in the State, so a failure sets it back: %s. Pass it when you create the State: "
    "State(name=object)"
)
_VARIABLES = (
    "ddp.elastic: %s() changes variables from step to step that begin again after a failure: %s. Make them fields, for "
    "example State(%s=...) and state.%s"
)
_SOURCES = (
    "ddp.elastic: the ranks run different versions of %s: a file was edited while the job ran, or is not the same on "
    "all nodes. `ddpctl restart` restarts all ranks with the same files"
)


class FirstLooks:
    """What is looked at in the first commits of a State. All of it only warns, once, on the first rank."""

    def __init__(self) -> None:
        self._variables = CarriedVariables()
        self._is_first = True
        self._averages: dict[str, tuple[int, ...]] = {}

    def at_commit(
        self, frame: FrameType, kept: Iterable[object], fields: Mapping[str, Any], tells: bool
    ) -> FirstLooks | None:
        """Return what looks at the next commit."""
        if not tells:
            return None
        with suppress(Exception):  # a script may do anything with its frames and objects
            if self._is_first and (found := objects(kept, frame)):
                log.warning(_OBJECTS, ", ".join(found))
            averages = copies_of_weights(kept, frame)
            changed = [name for name, seen in averages.items() if self._averages.get(name, seen) != seen]
            if changed:
                log.warning(_OBJECTS, ", ".join(sorted(changed)))
            self._averages = {} if changed else averages if self._is_first else self._averages
            self._is_first = False
            lost = self._variables.look(frame, fields)
            if lost:
                name = lost[0].partition(" ")[0]
                log.warning(_VARIABLES, frame.f_code.co_name, ", ".join(lost), name, name)
            return None if self._variables.is_over else self
        return None


# --- objects ---------------------------------------------------------------------------------------
#
# An object counts if it was used and has something to lose: an optimizer with a state, a scheduler that has made a
# step, a scaler that is on, averaged weights, a sampler, parameters that an optimizer of the State updates.


def objects(kept: Iterable[object], frame: FrameType | None = None) -> list[str]:
    """Describe what is used and not among `kept`, the values of all open States. `frame`: where names are looked up."""
    known = _with_parts(kept)
    names = _names(frame)
    has_sampler = any(isinstance(each, ElasticSampler) for each in known.values())
    found = {}
    for each in instances_of(_KINDS):
        if id(each) not in known and _is_used(each, has_sampler):
            found[id(each)] = f"{names.get(id(each), 'an object')} ({type(each).__name__})"
    return sorted(found.values()) + _parameters(known, names)


_KINDS = (
    torch.optim.Optimizer,
    LRScheduler,
    torch.amp.GradScaler,
    AveragedModel,
    ElasticSampler,
    DistributedSampler,
)


def _with_parts(kept: Iterable[object]) -> dict[int, object]:
    """The values by their identities, with what they hold: a wrapper may hold the optimizer that it runs."""
    found: dict[int, object] = {}
    waiting = [each.value if isinstance(each, PerRank) else each for each in kept]
    for depth in range(3):
        found |= {id(each): each for each in waiting}
        inner = [value for each in waiting for value in _attributes(each)]
        inner += [item for value in inner if isinstance(value, (list, tuple)) for item in value[:64]]
        waiting = [
            each for each in inner if isinstance(each, (*_KINDS, torch.nn.Module)) and id(each) not in found
        ]
        if depth == 2 or not waiting:
            break
    return found


def _attributes(value: object) -> list[object]:
    return list(getattr(value, "__dict__", {}).values())


def _is_used(value: Any, has_sampler: bool) -> bool:
    match value:
        case torch.optim.Optimizer():
            return bool(value.state)
        case LRScheduler():
            return value.last_epoch > 0
        case torch.amp.GradScaler():
            return bool(value.is_enabled())
        case AveragedModel():
            return int(value.n_averaged) > 0
        case ElasticSampler():
            return True
        case _:  # DistributedSampler: of several, one is enough
            return not has_sampler and isinstance(value, DistributedSampler)


def _parameters(known: Mapping[int, object], names: Mapping[int, str]) -> list[str]:
    models = [each for each in known.values() if isinstance(each, torch.nn.Module)]
    there = {id(parameter) for model in models for parameter in model.parameters()}
    found = []
    for each in known.values():
        if isinstance(each, torch.optim.Optimizer) and each.state:
            missing = sum(id(p) not in there for group in each.param_groups for p in group["params"])
            if missing and not any(hasattr(each, name) for name in ("whole_parameters", "optim")):
                found.append(f"{missing} parameters that {names.get(id(each), 'an optimizer')} updates")
    return found


def copies_of_weights(kept: Iterable[object], frame: FrameType) -> dict[str, tuple[int, ...]]:
    """What holds tensors with the shapes of a model's parameters, as an average of the weights does, by its name.

    With what changes when it does: its identity, and the identities and versions of its tensors.
    """
    known = _with_parts(kept)
    models = [list(each.parameters()) for each in known.values() if isinstance(each, torch.nn.Module)]
    shapes = [sorted(map(_shape, parameters)) for parameters in models if parameters]
    places = {each.data_ptr() for parameters in models for each in parameters}
    found = {}
    for name, value in (vars(sys.modules["__main__"]) | locals_of(frame)).items():
        is_other = id(value) in known or issubclass(type(value), (*_KINDS, ModuleType, type))
        for inner in () if is_other else (value, *_attributes(value)):
            tensors = _tensors(inner)
            if sorted(map(_shape, tensors)) in shapes and not any(t.data_ptr() in places for t in tensors):
                seen = (id(inner), *(number for each in tensors for number in (id(each), each._version)))
                found[f"{name} ({type(value).__name__})"] = seen
                break
    return found


def _tensors(value: object) -> list[torch.Tensor]:
    kind = type(value)  # isinstance would ask the object, and some of torch's warn then
    if issubclass(kind, torch.nn.Module):
        return list(value.parameters())  # type: ignore[attr-defined]
    items: Any = value.values() if kind is dict else value if kind is list else ()  # type: ignore[attr-defined]
    return [each for each in items if issubclass(type(each), torch.Tensor)]


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _names(frame: FrameType | None) -> dict[int, str]:
    main = sys.modules.get("__main__")
    found = {id(value): name for name, value in vars(main).items()} if main is not None else {}
    if frame is not None:
        found |= {id(value): name for name, value in locals_of(frame).items()}
    return found


# --- variables -------------------------------------------------------------------------------------
#
# A variable carries something from step to step if the loop around commit() reads it before it sets it, and its value
# changes; or if it is a list or a dictionary from outside of the loop that grows. One whose value is always that of a
# field of the State is kept there.

_PLAIN = (int, float, str, bool, complex, bytes)
_GROWING = (list, dict, set, deque)
_LOOKS = 3
_READS = ("LOAD_FAST", "LOAD_DEREF", "LOAD_NAME", "LOAD_GLOBAL")
_WRITES = ("STORE_FAST", "STORE_DEREF", "STORE_NAME", "STORE_GLOBAL")


class CarriedVariables:
    """FirstLooks at the frame that calls commit(), at some commits in a row."""

    def __init__(self) -> None:
        self._code: CodeType | None = None
        self._carried: dict[str, int] = {}
        self._outside: set[str] = set()
        self._seen: list[dict[str, Any]] = []
        self._is_field: dict[str, bool] = {}

    @property
    def is_over(self) -> bool:
        return len(self._seen) >= _LOOKS

    def look(self, frame: FrameType, fields: Mapping[str, Any]) -> list[str]:
        """Return the variables that are lost after a failure, at the last look; before it, nothing."""
        if self._code is not frame.f_code:
            self._code, self._seen, self._is_field = frame.f_code, [], {}
            self._carried, self._outside = carried(frame.f_code, frame.f_lasti)
        values = frame.f_globals | locals_of(frame)
        now = {name: _comparable(values[name]) for name in self._carried if name in values}
        now |= {
            name: (id(values[name]), len(values[name]))
            for name in self._outside
            if isinstance(values.get(name), _GROWING)
        }
        now = {name: value for name, value in now.items() if value is not None}
        for name in now:
            same = any(_comparable(field) == now[name] for field in fields.values())
            self._is_field[name] = self._is_field.get(name, True) and same
        self._seen.append(now)
        return self._lost() if self.is_over else []

    def _lost(self) -> list[str]:
        always = set.intersection(*(set(each) for each in self._seen))
        return sorted(
            f"{name} (line {self._carried[name]})" if name in self._carried else name
            for name in always
            if not self._is_field[name] and self._changes(name)
        )

    def _changes(self, name: str) -> bool:
        values = [each[name] for each in self._seen]
        is_same_object = name in self._carried or len({each[0] for each in values}) == 1
        return is_same_object and len(set(values)) > 1


def locals_of(frame: FrameType) -> dict[str, Any]:
    """A copy. Up to Python 3.12 a frame keeps what it has given, so a variable would outlive its `del`."""
    given = frame.f_locals
    found = dict(given)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        given.clear()
    return found


def _comparable(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
        return value.item()
    return value if isinstance(value, _PLAIN) else None


def carried(code: CodeType, at: int) -> tuple[dict[str, int], set[str]]:
    """The variables that the innermost loop around this place reads before it sets them, and sets, with their lines.

    And those that it only reads.
    """
    instructions = list(dis.get_instructions(code))
    loops = [
        (int(each.argval), each.offset)
        for each in instructions
        if "JUMP_BACKWARD" in each.opname and each.argval <= at <= each.offset
    ]
    if not loops:
        return {}, set()
    begin, end = max(loops)
    first: dict[str, str] = {}
    written: dict[str, int] = {}
    line = code.co_firstlineno
    for each in instructions:
        line = _line_of(each) or line
        if not begin <= each.offset <= end:
            continue
        for operation, name in _accesses(each):
            first.setdefault(name, operation)
            if operation == "write":
                written.setdefault(name, line)
    read_first = {name for name, operation in first.items() if operation == "read"}
    return {name: written[name] for name in read_first & set(written)}, read_first - set(written)


def _line_of(instruction: Any) -> int:
    line = getattr(instruction, "line_number", None) or instruction.starts_line  # a bool from 3.13 on
    return line if isinstance(line, int) and not isinstance(line, bool) else 0


def _accesses(instruction: Any) -> list[tuple[str, str]]:
    """What one instruction reads and writes, in this order. Newer releases of Python have instructions for pairs."""
    names: Sequence[Any] = (
        instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    )
    kinds = [
        "read" if word.startswith("LOAD") else "write"
        for word in instruction.opname.replace("_LOAD", " LOAD").replace("_STORE", " STORE").split()
    ]
    if not instruction.opname.startswith((*_READS, *_WRITES)):
        return []
    return [(kind, str(name)) for kind, name in zip(kinds * len(names), names, strict=False)]


# --- files of the script ---------------------------------------------------------------------------

_MOST_FILES = 200
_EDITED = -1  # instead of a checksum: an unknown, older version
_CLOCKS_DIFFER_S = 10.0


@functools.cache
def sources() -> dict[str, int]:
    """Checksums of the script and of what it has imported from its folder, at the first call: a survivor has that."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if not main:
        return {}
    folder = Path(main).resolve().parent
    files = [getattr(each, "__file__", None) for each in list(sys.modules.values())]
    paths = {Path(main).resolve(), *(Path(each).resolve() for each in files if each and each.endswith(".py"))}
    found: dict[str, int] = {}
    began = _began_at()
    for path in sorted(
        each for each in paths if folder in each.parents and "site-packages" not in each.parts
    ):
        if len(found) < _MOST_FILES:
            try:
                found[os.path.relpath(path, folder)] = _checksum(path, began)
            except OSError:
                continue
    return found


def _began_at() -> float:
    """When this process began, on the clock of files, which may be that of a server."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s - _CLOCKS_DIFFER_S


def _checksum(path: Path, began: float) -> int:
    """Of what this process runs. A file that is younger than the process may have been edited since it was loaded."""
    source = path.read_bytes()
    is_edited = path.stat().st_mtime > began and not _has_loaded(path, source)
    return _EDITED if is_edited else zlib.crc32(source)


def _has_loaded(path: Path, source: bytes) -> bool:
    """Whether all code of this file that is in memory is in `source`, too."""
    try:
        waiting: list[CodeType] = [compile(source, str(path), "exec", dont_inherit=True)]
    except (SyntaxError, ValueError):
        return False
    there = set[CodeType]()
    while waiting:
        there.add(waiting[-1])
        waiting += [each for each in waiting.pop().co_consts if isinstance(each, CodeType)]
    return there.issuperset(_loaded(path))


def _loaded(path: Path) -> Iterator[CodeType]:
    """Module code that still runs, functions, and methods."""
    files = functools.cache(lambda name: Path(name).resolve() == path)
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if files(frame.f_code.co_filename):
            yield frame.f_code
        frame = frame.f_back
    for module in list(sys.modules.values()):
        if (file := getattr(module, "__file__", None)) and files(file):
            values = list(vars(module).values())
            values += [inner for each in values if isinstance(each, type) for inner in vars(each).values()]
            functions = (each.__code__ for each in values if isinstance(each, FunctionType))
            yield from (code for code in functions if files(code.co_filename))


def tell_of_sources(rank: int, of_ranks: Sequence[Mapping[str, int]]) -> None:
    if rank == 0 and (found := differing(of_ranks)):
        log.warning(_SOURCES, ", ".join(found))


def differing(of_ranks: Sequence[Mapping[str, int]]) -> list[str]:
    """The files that some ranks have read in another version."""
    names = {name for each in of_ranks for name in each}
    return sorted(name for name in names if len({each[name] for each in of_ranks if name in each}) > 1)
