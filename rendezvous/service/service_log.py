"""The log of the service: text or JSON lines, each with its job and generation if it concerns one."""

from __future__ import annotations

import json
import logging
import sys
import time

_FIELDS = ("job", "generation", "kind")


class TextLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        fields = "".join(f" {name}={_one_line(value)}" for name, value in _extra_fields(record).items())
        text = f"{at} {record.levelname.lower()}{fields}: {_one_line(record.getMessage())}"
        return text + (f"\n{self.formatException(record.exc_info)}" if record.exc_info else "")


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {"at": round(record.created, 3), "level": record.levelname.lower(), **_extra_fields(record)}
        fields["text"] = record.getMessage()
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def _extra_fields(record: logging.LogRecord) -> dict[str, object]:
    return {name: getattr(record, name) for name in _FIELDS if hasattr(record, name)}


def _one_line(value: object) -> str:
    """Escape line breaks: names and reasons come from clients and must not look like another log line."""
    text = str(value)
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else "\\n" if c == "\n" else "?" for c in text)
    )


def start_logging(form: str, level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
