"""Parse the text of each option into its value.

A parser returns the value or raises `BadValue` with the problem, the expected form and an example. A parser does not
know the source of the text. The caller adds the source and writes the example in the syntax of that source
(`--nnodes 1:3`, `DDP_LAUNCH_NNODES=1:3`).
"""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any

from launcher.settings.spec import Budgets, Debug, StopCondition, StreamChoice, Streams
from rendezvous.values.contracts import PORT
from rendezvous.values.durations import UNITS, seconds_in
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.types import (
    UNLIMITED,
    CrashLoop,
    FailureClass,
    PolicyAction,
    PolicyRule,
    RestartBudget,
    StragglerPolicy,
    StragglerRule,
)

# --- values ----------------------------------------------------------------------------------------

MAX_NODES = 100_000
MAX_RANKS_PER_NODE = 4096
MAX_COUNT = 1_000_000
MAX_DURATION_S = 10 * 365 * 86400.0
PREFIX_FIELDS = ("node", "rank", "local_rank", "role", "generation")
_MOST_IN_A_GROUP = 256  # nodes; as in the wing redundancy
_LOOPBACK = "127.0.0.1"
_SHOWN = 80  # characters; a message truncates a longer value
_DURATION_FORM = ("a number of seconds or a number with a unit (ms, s, m, h, d)", "5m")
_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off", "")


class BadValue(Exception):
    def __init__(self, problem: str, form: str = "", example: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.form = form
        self.example = example


def printable(text: str) -> str:
    """`text` for a message: one printable line of limited length, in quotes only if it needs them."""
    return quote(text) if not text or " " in text or not text.isprintable() else _truncate(text)


def quote(text: str) -> str:
    """`text` for a message, always in quotes."""
    return repr(_truncate(text)) if text.isprintable() else ascii(_truncate(text))


def _truncate(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def switch(text: str) -> bool:
    """Parse a switch: a number (0 is off) or a word such as on, off, yes, no."""
    word = text.strip().lower()
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    try:
        return bool(int(word))
    except ValueError:
        raise BadValue("a switch must be on or off", "1 or 0", "1") from None


def text(value: str) -> str:
    if not value.strip():
        raise BadValue("the value is empty; use a value, or remove the option")
    _encodable(value)
    return value


def command(value: str) -> str:
    """Parse a command in the syntax of a shell."""
    text(value)
    try:
        shlex.split(value)
    except ValueError:
        raise BadValue("a quotation mark is not closed; close it") from None
    return value


def path(value: str) -> str:
    """Parse a path; unlike other text, it may contain bytes that are not UTF-8."""
    if not value.strip():
        raise BadValue("the path is empty; use a path, or remove the option")
    if "\0" in value:
        raise BadValue("a path cannot contain a NUL character; remove the character")
    return value


def run_id(value: str) -> str:
    text(value)
    if "/" in value or not value.isprintable() or value in (".", "..") or len(value) > 128:
        raise BadValue("not a file name", "at most 128 printable characters without '/'", "run7")
    return value


def paths(value: str) -> tuple[str, ...]:
    return tuple(path(part) for part in value.split(","))


def choice(*names: str) -> Callable[[str], str]:
    """One of these names; of a StrEnum, its member."""

    def parse(value: str) -> str:
        if value not in names:
            raise BadValue("unknown value", f"one of {', '.join(names)}", nearest(value, names) or names[0])
        return names[names.index(value)]

    return parse


def count(value: str, least: int = 0, most: int = MAX_COUNT) -> int:
    number = parse_int(value)
    if number is None:
        raise BadValue("not a whole number", f"a number, at least {least}", str(max(least, 1)))
    if number < least:
        raise BadValue(f"below the minimum {least}", f"a number, at least {least}", str(max(least, 1)))
    if number > most:
        raise BadValue(f"above the maximum {most}", f"a number from {least} to {most}", str(least))
    return number


def redundancy(value: str) -> str:
    """none, auto, copies:N or code:K+M: what the ranks accept in DDP_REDUNDANCY."""
    found = re.fullmatch(r"none|auto|copies:([1-9]\d{0,2})|code:([1-9]\d{0,2})\+([1-9]\d{0,2})", value)
    form = ("none, auto, copies:N or code:K+M with numbers from 1", "code:6+2")
    if found is None:
        raise BadValue("not a redundancy", *form)
    copies, k, m = (int(each or 0) for each in found.groups())
    if max(copies + 1, k + m) > _MOST_IN_A_GROUP:
        raise BadValue(f"a group has at most {_MOST_IN_A_GROUP} nodes", *form)
    return value


def resume_arg(value: str) -> str:
    form = ("arguments with {path} in them", "--ckpt {path}")
    if "{path}" not in value:
        raise BadValue("it does not contain {path}", *form)
    try:
        shlex.split(value)
    except ValueError as error:
        raise BadValue(f"a quotation does not end ({error})", *form) from error
    return value


def nnodes(value: str) -> tuple[int, int]:
    parts = [parse_int(part) for part in value.split(":")]
    form = ("N or MIN:MAX", "1:3")
    if len(parts) not in (1, 2) or None in parts:
        raise BadValue("not a number of nodes and not a range", *form)
    least, most = parts[0] or 0, parts[-1] or 0
    if least < 1 or most < 1:
        raise BadValue("a job needs at least one node", *form)
    if least > most:
        raise BadValue(f"the minimum {least} is above the maximum {most}", "MIN:MAX", f"{most}:{least}")
    if most > MAX_NODES:
        raise BadValue(f"above the maximum of {MAX_NODES} nodes", *form)
    return least, most


def nproc(value: str) -> str:
    """A positive number, or the name of a device type. `launcher.machine.devices` counts, and asks torch about types
    that extensions of torch add.
    """
    form = ("auto, gpu, cpu, xpu or a number of ranks", "2")
    number = parse_int(value)
    if number is None:
        word = value.strip()
        if not word.isidentifier():
            raise BadValue("unknown device type", *form)
        return word
    if number < 1:
        raise BadValue("below the minimum of 1 rank per node", *form)
    if number > MAX_RANKS_PER_NODE:
        raise BadValue(f"above the maximum of {MAX_RANKS_PER_NODE} ranks per node", *form)
    return str(number)


def port(value: str) -> int:
    number = parse_int(value)
    if number is None or not 0 <= number <= 65535:
        raise BadValue("not a port", "a number from 1 to 65535, or 0 for any free port", "29500")
    return number


def host(value: str) -> str:
    name = value.strip()
    if name.startswith("[") and name.endswith("]"):
        name = name[1:-1]
    labels = name.removesuffix(".").split(".")  # the resolver rejects an empty or a longer label
    if not re.fullmatch(r"[A-Za-z0-9_.:%-]+", name) or not all(0 < len(label) < 64 for label in labels):
        raise BadValue("not a host name or address", "a host name, IPv4 or IPv6 address", "10.0.0.1")
    return name


def interface(value: str) -> str:
    if not re.fullmatch(r"[^\s/]{1,15}", value):
        raise BadValue("not the name of a network interface", "the name of an interface", "eth0")
    return value


def endpoint(value: str) -> tuple[str, int]:
    form = ("HOST[:PORT] ([ADDRESS]:PORT for IPv6)", "node0:29400")
    found = re.fullmatch(r"\s*(\[[^\[\]]+\]|[^:\s]+)(?::(\d{1,5}))?\s*", value)
    if not found:
        raise BadValue("not HOST:PORT", *form)
    number = int(found[2]) if found[2] else PORT
    if number > 65535:
        raise BadValue(f"port {number} is out of range (1 to 65535)", *form)
    try:
        return host(found[1]), number
    except BadValue as problem:
        raise BadValue(problem.problem, *form) from None


def endpoints(value: str) -> str:
    """Parse HOST[:PORT][,...]; return it in canonical form, with ports."""
    found = [endpoint(part) for part in value.split(",")]
    if any(number == 0 for _, number in found):
        raise BadValue(
            "port 0 means any free port, and other nodes cannot know which one", "HOST:PORT", "node0:29400"
        )
    return ",".join(join_endpoint(*each) for each in found)


def join_endpoint(host_name: str, number: int) -> str:
    return f"[{host_name}]:{number}" if ":" in host_name else f"{host_name}:{number}"


def torch_endpoint(value: str) -> str:
    """Parse torchrun's endpoint, where port 0 is valid for a job on one node."""
    return join_endpoint(*endpoint(value))


def duration(value: str) -> float:
    """Parse a number of seconds, or a number with the unit ms, s, min (or m), h or d."""
    seconds = seconds_in(value)
    if seconds is None:
        raise BadValue("not a duration", *_DURATION_FORM)
    if seconds < 0:
        raise BadValue("a duration cannot be negative", *_DURATION_FORM)
    if seconds > MAX_DURATION_S:
        raise BadValue("a duration cannot be longer than ten years", *_DURATION_FORM)
    return seconds


def positive_duration(value: str) -> float:
    seconds = duration(value)
    if seconds == 0:
        raise BadValue("the duration must be greater than 0", *_DURATION_FORM)
    return seconds


def streams(value: str) -> StreamChoice:
    """Parse torchrun's choice of streams: `3` for all local ranks, `0:1,1:2` for some."""
    form = ("0 (none), 1 (stdout), 2 (stderr), 3 (both), or LOCAL_RANK:STREAM[,...]", "0:3,1:2")
    if re.fullmatch(r"[0-3]", value):
        return StreamChoice(Streams(int(value)))
    if not re.fullmatch(r"\d{1,4}:[0-3](,\d{1,4}:[0-3])*", value, re.ASCII):
        raise BadValue("not a choice of output streams", *form)
    pairs = dict(part.split(":") for part in value.split(","))
    return StreamChoice(
        Streams.NONE, tuple((int(rank), Streams(int(which))) for rank, which in pairs.items())
    )


def numbers(value: str, what: str, below: int) -> tuple[int, ...]:
    found = [parse_int(part) for part in value.split(",")]
    valid = [number for number in found if number is not None and 0 <= number < below]
    if len(valid) != len(found):
        raise BadValue(f"not a list of {what}", f"numbers from 0 to {below - 1}, separated by commas", "0,2")
    return tuple(sorted(dict.fromkeys(valid)))


def filters(value: str) -> tuple[str, ...]:
    """Split at commas; a double comma stands for one comma."""
    return tuple(part.replace("\0", ",") for part in value.replace(",,", "\0").split(",") if part)


def signals(value: str) -> tuple[int, ...]:
    form = ("signal names, separated by commas", "SIGTERM,SIGINT,SIGUSR1")
    found = []
    for part in value.split(","):
        word = part.strip().upper()
        name = word if word.startswith("SIG") else "SIG" + word
        if name not in signal.Signals.__members__:
            raise BadValue(f"unknown signal {quote(part)}", *form)
        number = signal.Signals[name]
        if number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
            raise BadValue(f"ddp-launch cannot handle {name}", *form)
        found.append(int(number))
    return tuple(dict.fromkeys(found))


def prefix(value: str) -> str:
    """Parse a template for str.format; an empty template turns the prefix off."""
    form = ("text with the fields " + " ".join(f"{{{name}}}" for name in PREFIX_FIELDS), "[{node}:{rank}] ")
    _encodable(value)
    from string import Formatter

    try:
        fields = [field for _, field, _, _ in Formatter().parse(value) if field is not None]
        unknown = [field for field in fields if field not in PREFIX_FIELDS]
        if not unknown:
            value.format(**dict.fromkeys(PREFIX_FIELDS, 0))
    except (ValueError, LookupError) as error:
        raise BadValue(f"invalid template ({error}); write {{{{ for a literal {{", *form) from None
    if unknown:
        raise BadValue(f"unknown field {quote(unknown[0])}", *form)
    return value


def prefix_from_torch(template: str) -> str:
    """Convert the template of torchrun's --log-line-prefix-template to our fields. Other text stays as it is."""
    names = {"role_name": "{role}", "rank": "{rank}", "local_rank": "{local_rank}", "hostname": "{node}"}

    def ours(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        return names.get(found[1] or found[2], found[0].replace("{", "{{").replace("}", "}}"))

    pattern = re.compile(r"\$\$|\$(?:([a-zA-Z_]\w*)|\{([a-zA-Z_]\w*)\})|[{}]", re.ASCII)
    return pattern.sub(lambda found: found[0] * 2 if found[0] in "{}" else ours(found), template)


def pairs(value: str) -> dict[str, str]:
    """Parse torchrun's --rdzv-conf, KEY=VALUE[,KEY=VALUE...], also inside quotes that the shell did not remove."""
    quoted = re.fullmatch(r"(['\"])(.*)\1", value.strip(), re.DOTALL)
    words = quoted[2] if quoted else value
    found: dict[str, str] = {}
    for part in words.split(",") if words.strip() else ():
        key, _, item = (word.strip() for word in part.partition("="))
        if not key or not item:
            raise BadValue(f"{quote(part)} is not KEY=VALUE", "KEY=VALUE[,...]", "join_timeout=900")
        found[key] = item
    return found


def nearest(word: str, names: Iterable[str]) -> str | None:
    from difflib import get_close_matches

    known = list(names)
    found = get_close_matches(word[:200], known, n=1, cutoff=0.6)
    if not found and len(word) > 2:
        found = [name for name in known if name.startswith(word[:5])]
    return found[0] if found else None


def parse_int(value: str) -> int | None:
    """The number if `value` is at most 18 ASCII digits, which `int` always accepts; else None."""
    word = value.strip()
    return int(word) if re.fullmatch(r"[+-]?\d{1,18}", word, re.ASCII) else None


def _encodable(value: str) -> None:
    """Reject text that cannot be sent to other nodes as UTF-8."""
    if "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise BadValue("it contains bytes that are not UTF-8, or a NUL character; remove them")


# --- --max-restarts, --max-heals, --crash-loop, --failure-policy -----------------------------------


_CRASH_LOOP_FORM = ("TIMES/TIME, TIMES/step, both with a comma, or off", "3/1s,5/step")


def budget(value: str) -> RestartBudget:
    return _budget_of(value, "restarts", "N, or N/WINDOW")


def _budget_of(value: str, what: str, words: str) -> RestartBudget:
    form = (words, "5/1h")
    limit_text, slash, window = value.partition("/")
    limit = parse_int(limit_text)
    if limit is None or limit > MAX_COUNT:
        raise BadValue(f"not a number of {what}", *form)
    if limit < 0:
        raise BadValue(f"the number of {what} cannot be negative", *form)
    if not slash:
        return RestartBudget(limit)
    unit = window.strip()
    try:  # "3/m" means three per minute
        seconds = positive_duration("1" + unit if unit in UNITS else unit)
    except BadValue:
        raise BadValue(f"the window {quote(window)} must be a duration greater than 0", *form) from None
    return RestartBudget(limit, seconds)


def heals(value: str) -> RestartBudget:
    """Parse the budget of decisions in place: as `budget`, or `unlimited`."""
    if value.strip().lower() == "unlimited":
        return RestartBudget(UNLIMITED)
    return _budget_of(value, "heals", "N, N/WINDOW, or unlimited")


def crash_loop(value: str) -> CrashLoop:
    if value.strip().lower() == "off":
        return CrashLoop()
    rule, parts = CrashLoop(), value.split(",")
    if len(parts) > 2 or (len(parts) == 2 and _is_of_steps(parts[0]) == _is_of_steps(parts[1])):
        raise BadValue("it has more than one part TIMES/TIME or TIMES/step", *_CRASH_LOOP_FORM)
    for part in parts:
        rule = _with_crash_loop_part(rule, part)
    return rule


def _is_of_steps(part: str) -> bool:
    return part.partition("/")[2].strip() == "step"


def _with_crash_loop_part(rule: CrashLoop, part: str) -> CrashLoop:
    times_text, slash, within = part.partition("/")
    times = parse_int(times_text.strip())
    if not slash or times is None or not 0 <= times <= MAX_COUNT:
        raise BadValue(f"{quote(part)} does not have the form TIMES/TIME or TIMES/step", *_CRASH_LOOP_FORM)
    if _is_of_steps(part):
        return replace(rule, without_step=times)
    try:
        return replace(rule, times=times, within_s=duration(within))
    except BadValue:
        raise BadValue(f"{quote(within)} is not a duration", *_CRASH_LOOP_FORM) from None


def rules(value: str) -> tuple[PolicyRule, ...]:
    found = tuple(_rule(part.strip()) for part in value.split(","))
    seen: list[tuple[FailureClass, int | None]] = []
    for rule in found:
        if (rule.failure, rule.exit_code) in seen:
            raise BadValue(
                f"class {rule.failure} is listed twice",
                "each class once",
                "hang=restart,hardware=exclude",
            )
        seen.append((rule.failure, rule.exit_code))
    return found


def _rule(text_: str) -> PolicyRule:
    form = ("CLASS=ACTION[,...]", "out-of-memory=fail,exit-code:3=ignore")
    left, equals, action = (part.strip() for part in text_.partition("="))
    name, colon, code_text = left.partition(":")
    if not equals:
        raise BadValue(f"{quote(text_)} does not have the form CLASS=ACTION", *form)
    if name not in tuple(FailureClass):
        raise BadValue(
            f"unknown failure class {quote(name)}; the classes are {', '.join(FailureClass)}", *form
        )
    if action not in tuple(PolicyAction):
        raise BadValue(f"unknown action {quote(action)}; the actions are {', '.join(PolicyAction)}", *form)
    if not colon:
        return PolicyRule(FailureClass(name), PolicyAction(action))
    code = parse_int(code_text)
    if name != FailureClass.EXIT_CODE or code is None or not 1 <= code <= 255:
        raise BadValue(f"invalid {quote(left)}: use exit-code:N, N from 1 to 255", *form)
    return PolicyRule(FailureClass.EXIT_CODE, PolicyAction(action), code)


# --- --hang-timeout --------------------------------------------------------------------------------


_HANG_FORM = (
    "auto, off, or TIME, which ,NAME=TIME may follow for start, first-step, checkpoint or evaluation",
    "30s,first-step=20m",
)


def hang_timeout(value: str) -> Budgets:
    first, *rest = (part.strip() for part in value.split(","))
    if first.lower() in ("auto", "off"):
        if rest:
            raise BadValue(
                f"{quote(','.join(rest))} has no effect after {first}: without TIME, no phase has a limit",
                *_HANG_FORM,
            )
        return Budgets(enabled=first.lower() == "auto")
    budgets = Budgets(step_s=_limit_s(first))
    for part in rest:
        budgets = _with_limit(budgets, part)
    return budgets


def _with_limit(budgets: Budgets, part: str) -> Budgets:
    name, equals, text = part.partition("=")
    time_s = _limit_s(text) if equals else 0.0
    match name.strip():
        case "start" if equals:
            return replace(budgets, start_s=time_s)
        case "first-step" if equals:
            return replace(budgets, first_step_s=time_s)
        case "checkpoint" if equals:
            return replace(budgets, checkpoint_s=time_s)
        case "evaluation" if equals:
            return replace(budgets, evaluation_s=time_s)
        case _:
            raise BadValue(
                f"unknown part {quote(part)}",
                *_HANG_FORM,
            )


def _limit_s(text: str) -> float:
    try:
        return positive_duration(text)
    except BadValue:
        raise BadValue(f"{quote(text)} must be a duration greater than 0", *_HANG_FORM) from None


# --- --stop-when -----------------------------------------------------------------------------------


_STOP_FORM = (
    '"NAME is nan" or "output matches REGEX", separated by ;',
    "loss is nan; output matches ^diverged",
)
_IS_NAN = re.compile(r"([\w./ -]*[\w./-])\s+is\s+nan", re.IGNORECASE)
_MATCHES = re.compile(r"output\s+matches\s+(\S.*)", re.DOTALL)


def stop_conditions(value: str) -> tuple[StopCondition, ...]:
    found = tuple(_stop_condition(part.strip()) for part in value.split(";") if part.strip())
    if not found:
        raise BadValue("no condition", *_STOP_FORM)
    return found


def _stop_condition(text: str) -> StopCondition:
    if found := _MATCHES.fullmatch(text):
        try:
            re.compile(found[1].encode())
        except re.error as error:
            raise BadValue(f"{found[1]!r} is not a regular expression: {error}", *_STOP_FORM) from None
        return StopCondition(text, found[1])
    if found := _IS_NAN.fullmatch(text):
        return StopCondition(text, nan_of(found[1]))
    raise BadValue(f"{text!r} is not a condition", *_STOP_FORM)


def nan_of(name: str) -> str:
    """A pattern for the ways in which scripts and libraries print that a number with this name is not a number.

    For example "train_loss=nan", "Loss: NaN", "{'loss': nan}", "loss tensor(nan, device='cuda:0')".
    """
    words = r"[ _]".join(map(re.escape, re.split(r"[ _]+", name)))
    return rf"(?i)(?<![a-z0-9]){words}[\"']?[ \t]*[:=]?[ \t]*(?:tensor\()?[-+]?nan\b"


# --- --stragglers, --health-port, --health-source --------------------------------------------------


_STRAGGLERS_FORM = (
    "off, report or exclude, optionally followed by ,factor=NUMBER or ,window=TIME",
    "report,factor=2,window=1m",
)


def stragglers(value: str) -> StragglerRule:
    first, *rest = (part.strip() for part in value.split(","))
    if first.lower() not in list(StragglerPolicy):
        raise BadValue(f"unknown value {quote(first)}", *_STRAGGLERS_FORM)
    rule = StragglerRule(StragglerPolicy(first.lower()))
    for part in rest:
        rule = _with_straggler_part(rule, part)
    return rule


def _with_straggler_part(rule: StragglerRule, part: str) -> StragglerRule:
    name, _, text = part.partition("=")
    match name.strip():
        case "factor":
            return replace(rule, factor=_straggler_factor(text))
        case "window":
            return replace(rule, window_s=_straggler_window(text))
    raise BadValue(f"unknown part {quote(part)}", *_STRAGGLERS_FORM)


def _straggler_factor(text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 1.0 < factor < float("inf"):
        raise BadValue(f"factor {quote(text)} must be a number greater than 1", *_STRAGGLERS_FORM)
    return factor


def _straggler_window(text: str) -> float:
    try:
        return positive_duration(text)
    except BadValue as bad:
        raise BadValue(f"invalid window {quote(text)}: {bad.problem}", *_STRAGGLERS_FORM) from None


def health_address(value: str) -> tuple[str, int]:
    """Parse PORT or ADDRESS:PORT; PORT alone means 127.0.0.1:PORT."""
    if value.strip().isdecimal():
        return _LOOPBACK, port(value)
    if ":" not in value:
        raise BadValue("not a port and not ADDRESS:PORT", "PORT or ADDRESS:PORT", "0.0.0.0:9410")
    return endpoint(value)


_SOURCES = ("kubernetes, a URL or a path, separated by commas", "kubernetes,http://127.0.0.1:9400/metrics")
_URL = re.compile(r"https?://([^/?#\s]+)(?:[/?]\S*)?", re.ASCII)


def health_sources(value: str) -> tuple[str, ...]:
    found = tuple(part.strip() for part in value.split(","))
    for each in found:
        if each == "kubernetes" or each.startswith(("/", "./", "../", "file:///")):
            continue
        url = _URL.fullmatch(each)
        if url is None or not each.isprintable():
            raise BadValue(f"unknown source {quote(each)}", *_SOURCES)
        if "@" in url[1]:
            raise BadValue("a URL must not contain a user name or a password", *_SOURCES)
        try:
            endpoint(url[1])
        except BadValue as bad:
            raise BadValue(f"invalid URL {quote(each)}: {bad.problem}", *_SOURCES) from None
    return tuple(dict.fromkeys(found))


def health_ignored(value: str) -> tuple[str, ...]:
    found = tuple(part.strip() for part in value.split(","))
    if not all(found):
        raise BadValue("a name is empty", "NAME[,...]", "DCGM_FI_DEV_XID_ERRORS,FrequentKubeletRestart")
    return found


def http_url(value: str) -> str:
    if not _URL.fullmatch(value.strip()):
        raise BadValue("not a URL", "http://HOST:PORT or https://HOST:PORT", "http://127.0.0.1:4318")
    return value.strip()


# --- --debug ---------------------------------------------------------------------------------------


def debug(value: str) -> Debug:
    text(value)
    rank_text, colon, place = value.partition(":")
    host, _, port_text = place.rpartition(":")
    rank, port = parse_int(rank_text), parse_int(port_text)
    if rank is None or not 0 <= rank < 1 << 24 or (colon and (port is None or not 0 < port < 65536)):
        raise BadValue("not a rank", "a global rank, or RANK:PORT for an editor", "1:5678")
    return Debug(rank, f"{host or _LOOPBACK}:{port}" if colon else "")


# --- hosts -----------------------------------------------------------------------------------------
#
# Parse the hosts of a job from `--hosts` or a hostfile. Pure.


@dataclass(frozen=True, slots=True)
class Host:
    name: str  # host or user@host, as ssh accepts it
    slots: int | None = None  # number of ranks; None: use --nproc-per-node

    @property
    def bare(self) -> str:
        return self.name.rpartition("@")[2]


def hosts(text: str) -> tuple[Host, ...]:
    """Parse `a,b:4,user@c`: host names, each with an optional number of ranks."""
    found = tuple(_host(part.strip()) for part in text.split(","))
    _reject_duplicates(found)
    return found


def _host(text: str) -> Host:
    bracketed = re.fullmatch(r"((?:[^@]+@)?)\[([^\]]+)\](?::(\d+))?", text)
    if bracketed:
        return Host(_check_name(bracketed[1] + bracketed[2]), _slots(bracketed[3]))
    name, colon, slots = text.rpartition(":")
    if not colon or ":" in name:  # no number, or an IPv6 address without brackets
        return Host(_check_name(text))
    return Host(_check_name(name), _slots(slots))


def _check_name(name: str) -> str:
    if not name or name.startswith("-") or not re.fullmatch(r"[\w.@:%+-]+", name):
        raise BadValue(f"invalid host name {quote(name)}", "HOST[:RANKS][,...]", "node1,node2:4")
    return name


def _slots(text: str | None) -> int | None:
    if text is None:
        return None
    number = parse_int(text)
    if number is None or not 0 < number <= 4096:
        raise BadValue(
            f"the number of ranks must be from 1 to 4096, not {quote(text)}",
            "HOST[:RANKS][,...]",
            "node1,node2:4",
        )
    return number


def _reject_duplicates(found: Sequence[Host]) -> None:
    names = [host.bare for host in found]
    for name in names:
        if names.count(name) > 1:
            raise BadValue(
                f"{name} is listed twice; one agent runs all ranks of a host",
                "each host once, with its number of ranks",
                f"{name}:2",
            )


def read_hostfile(text: str) -> tuple[Host, ...]:
    """Parse one host per line, `name` or `name slots=N`, as in MPI and DeepSpeed; # starts a comment."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            found.append(_host_line(words))
        except BadValue as bad:
            raise BadValue(f"line {number}: {bad.problem}") from None
    if not found:
        raise BadValue("the file is empty; write one host per line")
    _reject_duplicates(found)
    return tuple(found)


def _host_line(words: list[str]) -> Host:
    host = _host(words[0])
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if key not in ("slots", "max_slots") or not equals:
            close = nearest(key, ["slots"])
            raise BadValue(
                f"unexpected {quote(word)}; " + ("write slots=N" if close else "write one host per line")
            )
        if key == "slots":
            host = Host(host.name, _slots(value))
    return host


# --- the type of an option -------------------------------------------------------------------------
#
# The type of one option of `ddp-launch`; launcher/settings/options.py is the table of all options.


class Reach(IntEnum):
    """Sources that may set an option; each value also allows the sources of the values before it."""

    FLAG = 0
    ENVIRONMENT = 1
    FILE = 2


@dataclass(frozen=True, slots=True)
class Option:
    flag: str
    help: str
    parse: Callable[[str], Any] = text
    metavar: str = ""  # empty for a switch
    default: str | None = None
    short: str = ""
    negatable: bool = False  # a switch that also has a --no- form
    torchrun: bool = False
    pet: bool = False  # torchrun reads PET_<DEST>
    # Another variable, and the function that converts its text.
    foreign: tuple[str, Callable[[str], str]] | None = None
    # The reason why an option has no effect; it is accepted for compatibility with torchrun.
    without_effect: str = ""
    # The field of LaunchSpec, JobSpec or LogSpec that gets the value, if it has another name than the option.
    field: str = ""
    reach: Reach = Reach.FILE

    @property
    def dest(self) -> str:
        return self.flag[2:].replace("-", "_")

    @property
    def is_switch(self) -> bool:
        return not self.metavar

    @property
    def spellings(self) -> tuple[str, ...]:
        return (self.flag, "--no-" + self.flag[2:]) if self.negatable else (self.flag,)

    @property
    def variables(self) -> tuple[str, ...]:
        """Environment variables in order of precedence."""
        ours = (f"DDP_LAUNCH_{self.dest.upper()}",) if self.reach >= Reach.ENVIRONMENT else ()
        return (*ours, f"PET_{self.dest.upper()}") if self.pet else ours


def ours(form: str, parse: Callable[[str], Any], text: str, **more: Any) -> Option:
    """`form`: the flag, and the name of its value."""
    flag, _, metavar = form.partition(" ")
    return Option(flag, text, parse, metavar, **more)


def torch(form: str, parse: Callable[[str], Any], text: str, **more: Any) -> Option:
    return ours(form, parse, text, torchrun=True, **{"pet": True, **more})


def switch_option(flag: str, text: str, **more: Any) -> Option:
    return Option(flag, text, switch, **{"default": "0", **more})


def torch_switch_option(flag: str, text: str, **more: Any) -> Option:
    return switch_option(flag, text, torchrun=True, pet=True, **more)
