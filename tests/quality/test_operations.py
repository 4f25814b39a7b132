"""docs/operations.md promises what the lab's scenarios show, and leaves none of them out."""

from __future__ import annotations

import ast
import re

from tidy import ROOT

SCENARIOS = [
    *sorted((ROOT / "tests" / "lab").glob("test_*_scenarios.py")),
    ROOT / "tests/lab/test_random_faults.py",
]
# What happens there is up to the kernel and the network, or to chance (tests/sim/test_sim.py).
NOT_BY_RULES = {
    "test_a_slow_and_lossy_network",
    "test_a_network_of_ipv6_alone",
    "test_faults_in_a_row",
    "test_a_node_of_a_job_that_has_trained_regularly_is_missed_before_its_lease_ends",
}
# Its rows take what matters to an operator out of many.
ONE_COMMAND = [ROOT / "tests/lab/test_over_ssh.py", ROOT / "tests/shell/test_fleet.py"]


def scenarios(source: str) -> set[str]:
    """Tests that run a job in the lab."""
    functions = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    tests = (each for each in functions if each.name.startswith("test_"))
    return {each.name for each in tests if any(argument.arg == "lab" for argument in each.args.args)}


def promised(page: str) -> list[str]:
    """The last cell of each row of the page's tables."""
    return re.findall(r"^\|.*\| `(test_\w+)` \|$", page, re.MULTILINE)


def test_every_row_has_its_scenario_and_every_scenario_its_row() -> None:
    named = promised((ROOT / "docs" / "operations.md").read_text())
    assert len(named) == len(set(named)) > 10
    due = set().union(*(scenarios(path.read_text()) for path in SCENARIOS))
    more = set(
        re.findall(r"^def (test_\w+)", "".join(path.read_text() for path in ONE_COMMAND), re.MULTILINE)
    )
    assert due <= set(named) <= due | more


def test_every_row_that_rules_decide_has_a_transcript() -> None:
    texts = (path.read_text() for path in (ROOT / "tests" / "scenarios").glob("*.txt"))
    told = {
        name
        for text in texts
        for name in re.findall(r"^# docs/operations.md: (test_\w+)$", text, re.MULTILINE)
    }
    due = set().union(*(scenarios(path.read_text()) for path in SCENARIOS)) - NOT_BY_RULES
    assert told == due


def test_every_row_says_what_happens() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    rows = [
        row for table in page.split("\n\n") if table.startswith("| what") for row in table.splitlines()[2:]
    ]
    assert len(rows) == len(promised(page))
    for row in rows:
        what, happens, _test = row.strip("| ").split(" | ")
        assert len(what) > 5
        assert len(happens) > 20


def test_the_checks_can_fail() -> None:
    assert scenarios("def test_a(lab): pass\ndef test_b(): pass\ndef c(lab): pass") == {"test_a"}
    assert promised("| a rank raises | it restarts | `test_a` |\n| another | nobody knows |") == ["test_a"]
