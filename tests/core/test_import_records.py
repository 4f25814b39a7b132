"""What the zygote may try to import, from the records of its ranks."""

from __future__ import annotations

import json
import os
from typing import Any

from launcher.template.import_records import (
    Candidate,
    Record,
    Verdict,
    after_trial,
    candidates,
    difference,
    parse,
)

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
STDLIB = "/usr/lib/python3.12/"
SITE = "/venv/lib/site-packages"


def record(*lines: tuple[Any, ...]) -> Record:
    return parse(b"".join(json.dumps(line).encode() + b"\n" for line in lines))


def imported(name: str, importer: str = "", at: str = "") -> list[tuple[Any, ...]]:
    return [("begin", name, importer), ("from", name, at or f"{SITE}/{name}.py")]


def names(found: list[Candidate]) -> list[str]:
    return [each.name for each in found]


def test_an_unfinished_line_is_not_read() -> None:
    text = b'["begin", "a", ""]\n["from", "a", "/x/a.py"]\n["begin", "b'
    assert parse(text) == Record({"a": {}}, {"a": ""}, {"a": "/x/a.py"}, {})


def test_only_what_all_ranks_have_from_the_same_file() -> None:
    one = record(*imported("a"), *imported("b"), *imported("c"), *imported("d"))
    other = record(*imported("d"), *imported("c"), *imported("b", at="/elsewhere/site-packages/b.py"))
    assert names(candidates([one, other], {"d"}, STDLIB)) == ["c"]


def test_only_the_standard_library_and_installed_packages() -> None:
    places = {
        "json": f"{STDLIB}json/__init__.py",
        "numpy": f"{SITE}/numpy/__init__.py",
        "apt": "/usr/lib/dist-packages/apt.py",
        "own": "/home/me/own.py",
        "builtin": "built-in",
        "nowhere": "",
    }
    one = record(*(line for name, at in places.items() for line in imported(name, at=at or " ")))
    assert names(candidates([one], set(), STDLIB)) == ["json", "numpy", "apt", "builtin"]


def test_our_own_library_counts_as_installed_in_a_checkout_too() -> None:
    at = os.path.join(ROOT, "ddp", "shm.py")
    one = record(*imported("ddp.shm", at=at), *imported("mine", at=os.path.join(ROOT, "ddp_mine.py")))
    assert names(candidates([one], set(), STDLIB)) == ["ddp.shm"]


def test_what_a_package_imports_comes_with_it_but_the_scripts_own_files_are_looked_through() -> None:
    own = imported("own", at="/home/me/own.py")
    one = record(*own, *imported("numpy", "own"), *imported("numpy.fft", "numpy"), *imported("rich"))
    assert names(candidates([one], set(), STDLIB)) == ["numpy", "rich"]


def test_generators_that_each_fork_seeds_come_first() -> None:
    one = record(*imported("scipy"), *imported("numpy.random", "scipy"))
    assert names(candidates([one], set(), STDLIB)) == ["numpy.random", "scipy"]


def test_variables_are_those_when_the_import_began() -> None:
    one = record(
        *imported("a"),
        ("env", {"FLAG": "1"}),
        *imported("b"),
        ("env", {"FLAG": "1", "HOME": None}),
        *imported("c"),
    )
    found = {each.name: each for each in candidates([one], set(), STDLIB)}
    assert [found[name].variables for name in "abc"] == [{}, {"FLAG": "1"}, {"FLAG": "1", "HOME": None}]
    assert [set(found[name].unsettled) for name in "abc"] == [{"FLAG", "HOME"}, {"HOME"}, set()]


def test_a_variable_that_differs_between_ranks_is_not_settled() -> None:
    one, other = (record(("env", {"SEED": seed, "SAME": "x"}), *imported("a")) for seed in "12")
    assert [set(each.unsettled) for each in candidates([one, other], set(), STDLIB)] == [{"SEED"}]


def test_an_import_that_goes_another_way_is_found() -> None:
    rank = record(*imported("a"), *imported("a.b", "a"), *imported("plugin", "a", at="/home/me/plugin.py"))
    assert difference(record(*imported("a"), *imported("a.b", "a")), [rank], STDLIB) == ""
    assert "more" in difference(record(*imported("a"), *imported("more", "a")), [rank], STDLIB)
    assert "plugin" in difference(record(*imported("a"), ("begin", "plugin", "a")), [rank], STDLIB)
    assert difference(record(*imported("a"), ("begin", "optional", "a")), [rank], STDLIB) == ""
    moved = record(*imported("a", at="/other/site-packages/a.py"))
    assert "a" in difference(moved, [rank], STDLIB)


def tried(*wanted: str) -> list[Candidate]:
    return [Candidate(name, {}, frozenset()) for name in wanted]


def test_after_a_refusal_the_rest_is_tried_without_its_submodules() -> None:
    passed, refused, left = after_trial(
        tried("a", "bad", "bad.part", "badly"), [Verdict("a", ""), Verdict("bad", "it prints")]
    )
    assert (names(passed), refused, names(left)) == (["a"], {"bad": "it prints"}, ["badly"])


def test_a_module_that_ends_the_trial_is_refused() -> None:
    passed, refused, left = after_trial(tried("a", "crash", "c"), [Verdict("a", "")])
    assert (names(passed), names(left)) == (["a"], ["c"])
    assert refused == {"crash": "its import ends the process"}


def test_all_pass() -> None:
    passed, refused, left = after_trial(tried("a", "b"), [Verdict("a", ""), Verdict("b", "")])
    assert (names(passed), refused, left) == (["a", "b"], {}, [])


def test_an_error_of_the_trial_itself_ends_the_round() -> None:
    passed, refused, left = after_trial(tried("a", "b"), [Verdict("a", ""), Verdict("", "OSError: full")])
    assert (passed, refused, left) == ([], {"the rest": "OSError: full"}, [])
