"""Parse `--stragglers` and `--health-port`."""

from __future__ import annotations

from dataclasses import replace

from launcher.settings.values import BadValue, endpoint, port, positive_duration, quote
from rendezvous.values.types import StragglerPolicy, StragglerRule

_FORM = (
    "off, report or exclude, optionally followed by ,factor=NUMBER or ,window=TIME",
    "report,factor=2,window=1m",
)
_LOOPBACK = "127.0.0.1"


def stragglers(value: str) -> StragglerRule:
    first, *rest = (part.strip() for part in value.split(","))
    if first.lower() not in list(StragglerPolicy):
        raise BadValue(f"unknown value {quote(first)}", *_FORM)
    rule = StragglerRule(StragglerPolicy(first.lower()))
    for part in rest:
        rule = _with(rule, part)
    return rule


def _with(rule: StragglerRule, part: str) -> StragglerRule:
    name, _, text = part.partition("=")
    match name.strip():
        case "factor":
            return replace(rule, factor=_factor(text))
        case "window":
            return replace(rule, window_s=_window(text))
    raise BadValue(f"unknown part {quote(part)}", *_FORM)


def _factor(text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 1.0 < factor < float("inf"):
        raise BadValue(f"factor {quote(text)} must be a number greater than 1", *_FORM)
    return factor


def _window(text: str) -> float:
    try:
        return positive_duration(text)
    except BadValue as bad:
        raise BadValue(f"invalid window {quote(text)}: {bad.problem}", *_FORM) from None


def health_address(value: str) -> tuple[str, int]:
    """Parse PORT or ADDRESS:PORT; PORT alone means 127.0.0.1:PORT."""
    if value.strip().isdecimal():
        return _LOOPBACK, port(value)
    if ":" not in value:
        raise BadValue("not a port and not ADDRESS:PORT", "PORT or ADDRESS:PORT", "0.0.0.0:9410")
    return endpoint(value)
