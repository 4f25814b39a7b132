"""Decisions are values: a sentence is made for users, and no code looks into one to decide."""

import ast
from collections.abc import Iterator

import pytest
from tidy import Module, modules

SENTENCES = {"reason", "hint", "news", "health_note"}
LOOKS = {"startswith", "endswith", "removeprefix", "removesuffix", "replace", "partition", "find", "index"}


def sentences_read(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        match node:
            case ast.Call(func=ast.Attribute(value=text, attr=method)) if method in LOOKS and _is_sentence(
                text
            ):
                yield f"{module.name}:{node.lineno}: {method} on a sentence"
            case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[text]) if _is_sentence(text):
                yield f"{module.name}:{node.lineno}: looks for a part of a sentence"


def _is_sentence(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name in SENTENCES


def test_no_code_reads_a_sentence_back() -> None:
    ours = [module for module in modules() if module.package != "ddp"]
    assert [found for module in ours for found in sentences_read(module)] == []


@pytest.mark.parametrize(
    "source",
    [
        "how in told.reason",
        "'x' not in reason",
        "cause.reason.startswith('stopped')",
        "reason.replace('a', 'b')",
    ],
)
def test_a_sentence_that_is_read_is_seen(source: str) -> None:
    assert len(list(sentences_read(Module("launcher.agent", source)))) == 1


def test_a_sentence_that_is_passed_on_is_in_order() -> None:
    assert (
        list(sentences_read(Module("launcher.agent", "say(cause.reason); x = [reason, cause.reason]"))) == []
    )
