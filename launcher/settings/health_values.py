"""Parse `--stragglers`, `--health-port` and `--health-source`."""

from __future__ import annotations

import re
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
