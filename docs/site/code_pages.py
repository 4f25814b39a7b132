"""Pages from docstrings, tables, metrics and the schema of the protocol."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import variables

import ddp
from launcher.failure.symptoms import TABLE
from launcher.health import exposition
from launcher.notify.notifier import EventKind
from launcher.settings.options import OPTIONS
from rendezvous import metrics
from rendezvous.service import condition, server
from rendezvous.service.settings import SETTINGS, variable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
PROTO = ROOT / "proto" / "rendezvous" / "v1" / "rendezvous.proto"
_MODULES = ("elastic", "averaging")
_METRIC = re.compile(r"[a-z][a-z_]+")


# --- the Python API ------------------------------------------------------------------------------------------


def python_api() -> str:
    parts = [
        "# Python API of ddp",
        inspect.getdoc(ddp) or "",
        "How to use it: [train with the library](../ddp.md), [make a script elastic](../elastic.md).",
        *_entries(ddp, [name for name in ddp.__all__ if name not in _MODULES]),
    ]
    for name in _MODULES:
        module = getattr(ddp, name)
        parts += [f"## ddp.{name}", _prose(inspect.getdoc(module) or ""), *_entries(module, public(module))]
    return "\n\n".join(parts) + "\n"


def public(module: ModuleType) -> list[str]:
    """The names of `__all__`, or what the module itself defines."""
    named = getattr(module, "__all__", None)
    if named is not None:
        return list(named)
    own = (
        name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
    )
    return sorted(name for name in own if not name.startswith("_"))


def _entries(module: ModuleType, names: list[str]) -> Iterator[str]:
    for name in names:
        value = getattr(module, name)
        yield f"### {module.__name__}.{name}"
        yield _signature(name, value)
        yield _prose(inspect.getdoc(value) or "")
        if inspect.isclass(value):
            yield from _methods(value)


def _methods(of: type) -> Iterator[str]:
    for name, value in vars(of).items():
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if isinstance(function, property):
            text = inspect.getdoc(function) or ""
        elif inspect.isfunction(function):
            text = inspect.getdoc(function) or ""
        else:
            continue
        if not name.startswith("_") and text:
            yield f"#### {of.__name__}.{name}"
            yield "" if isinstance(function, property) else _signature(name, function)
            yield _prose(text)


def _signature(name: str, value: Any) -> str:
    try:
        shown = str(inspect.signature(value))
    except (TypeError, ValueError):
        return ""
    return f"```python\n{name}{re.sub(r' at 0x[0-9a-f]+', '', shown)}\n```"


def _prose(doc: str) -> str:
    """Our docstrings are text with indented code, which Markdown reads as we do."""
    return doc.replace("<", "&lt;")


# --- variables, metrics, events ----------------------------------------------------------------------------------


def environment() -> str:
    options = {
        ", ".join(f"`{name}`" for name in names): f"`{option.flag}`"
        for option in OPTIONS
        if (names := (*option.variables, *(option.foreign or ())[:1]))
    }
    served = {f"`{variable(setting)}`": f"`{setting.flag}`" for setting in SETTINGS}
    of_torchrun = [f"`{name}`" for name in rank_variables() if not name.startswith("DDP_")]
    parts = [
        "# Environment variables",
        "## Settings of ddp-launch",
        "Each variable sets an option; a flag overrides it. [The options](../options.md) say what they mean.",
        _table("option", options),
        "## Settings of the library in the ranks",
        _table("meaning", _quoted(variables.OF_THE_LIBRARY)),
        "## What each rank gets",
        "These have the meaning that they have under torchrun: " + ", ".join(of_torchrun) + ".",
        _table("meaning", _quoted(variables.OF_A_RANK)),
        "## Access to a service",
        "For agents and `ddpctl`.",
        _table("meaning", _quoted(variables.OF_CLIENTS)),
        "## Settings of ddp-rendezvous serve",
        "A variable sets an option; a flag overrides it. [The options](ddp-rendezvous.md) say what they mean.",
        _table("option", served | _quoted(variables.OF_THE_SERVICE)),
        "## Set for other programs",
        _table("meaning", _quoted(variables.OF_PROGRAMS)),
    ]
    return "\n\n".join(parts) + "\n"


def _quoted(described: Mapping[str, str]) -> dict[str, str]:
    return {f"`{name}`": words for name, words in described.items()}


def _table(what: str, rows: Mapping[str, str]) -> str:
    return "\n".join(
        (f"| variable | {what} |", "|---|---|", *(f"| {name} | {words} |" for name, words in rows.items()))
    )


def rank_variables() -> list[str]:
    source = (ROOT / "launcher" / "ranks" / "worker_env.py").read_text()
    names = re.findall(r'"([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+|RANK)"(?=: |\] = )', source)
    return sorted(set(names))


def metric_names() -> str:
    parts = [
        "# Metrics",
        "In the text format of Prometheus.",
        "## Of a node: `--health-port`",
        "\n".join(("| metric | type | |", "|---|---|---|", *agent_metrics())),
        "## Of the service: `ddp-rendezvous serve --http`",
        "\n".join(("| metric | type | label | |", "|---|---|---|---|", *service_metrics())),
    ]
    return "\n\n".join(parts) + "\n"


def service_metrics() -> list[str]:
    source = inspect.getsource(server) + inspect.getsource(condition)
    rows = [
        f"| `{metrics._PREFIX}{name}_total` | counter | `{label}` | {what} |"
        for name, (label, what) in metrics._COUNTERS.items()
    ]
    text = r'\s*"([^"]*)"'
    for name, what in re.findall(rf"metrics\.gauge\({text},{text},", source):
        rows.append(f"| `{metrics._PREFIX}{name}` | gauge | | {what} |")
    for name, what, label in re.findall(rf"metrics\.gauges\({text},{text},{text},", source):
        rows.append(f"| `{metrics._PREFIX}{name}` | gauge | `{label}` | {what} |")
    return rows


def agent_metrics() -> list[str]:
    source = inspect.getsource(exposition)
    text = r'"((?:[^"\\]|\\.)*)"'
    rows = []
    for name, first, second in re.findall(
        rf'(?<!_histogram)\(\s*"([a-z_]+)",\s*(?!"[a-z]){text}(?:\s*{text})?,', source
    ):
        kind = "counter" if name.endswith("_total") else "gauge"
        rows.append(f"| `{exposition._PREFIX}{name}` | {kind} | {first}{second} |")
    for name, what in re.findall(rf'_histogram\(\s*"([a-z_]+)",\s*{text}', source):
        rows.append(f"| `{exposition._PREFIX}{name}` | histogram | {what} |")
    return rows


def events() -> str:
    source = (ROOT / "launcher" / "notify" / "notifier.py").read_text()
    when = dict(re.findall(r'^    [A-Z_]+ = "([a-z_-]+)"  # (.*)$', source, re.MULTILINE))
    rows = [f"| `{kind}` | {when.get(kind, '')} |" for kind in EventKind]
    return (
        "\n\n".join(
            (
                "# Events",
                "What `--on-event` passes to a command, and entry points to a function. "
                "How to use them, and their fields: [events](../events.md).",
                "\n".join(("| event | when |", "|---|---|", *rows)),
            )
        )
        + "\n"
    )


def messages() -> str:
    rows = [
        f"| {', '.join(f'`{phrase}`' for phrase in each.phrases)} | {each.failure} | {each.restart} | {each.hint} |"
        for each in TABLE
    ]
    return (
        "# Messages of errors\n\nThe first row that matches a message decides the class of the failure, and the hint. "
        '`--failure-policy` sets the action; "suggested" is what fits. How it is used: '
        "[communication errors](../communication-errors.md).\n\n"
        + "\n".join(("| the message contains | class | suggested | hint |", "|---|---|---|---|", *rows, ""))
    )


# --- the protocol --------------------------------------------------------------------------------------------------


def protocol() -> str:
    """The comments of the schema explain it: it is shown whole, by its parts."""
    text = PROTO.read_text()
    head, _, _ = text.partition('syntax = "proto3";')
    services = re.findall(r"^service (\w+) \{.*?^\}", text, re.MULTILINE | re.DOTALL)
    return (
        "\n\n".join(
            (
                "# Wire protocol",
                "gRPC, over one port. Agents and tools in other languages need only this schema. "
                "[Which releases work together](../releases.md).",
                "\n".join(f"- `{name}`" for name in services),
                "```text\n" + re.sub(r"^// ?", "", head.strip(), flags=re.MULTILINE) + "\n```",
                "## The schema",
                "```proto\n" + text[len(head) :].strip() + "\n```",
            )
        )
        + "\n"
    )
