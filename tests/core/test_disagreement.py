"""The options that all nodes of a job must agree on: a node that differs is refused, and the option is named."""

from dataclasses import fields

import pytest
from job_story import Story

from launcher.settings.arguments import read_arguments
from launcher.settings.assemble import HostEnvironment, assemble, entry_point
from launcher.settings.config import ConfigFile, merge
from launcher.settings.options import BY_SPELLING
from rendezvous.rounds.admission import KNOWN_AS
from rendezvous.values.events import Notice, RefusalKind, Refused, Waiting
from rendezvous.values.types import JobSpec

# Each with a value that is not the default.
AGREED = {
    "--nnodes": "3:4",
    "--nproc-per-node": "2",
    "--max-restarts": "7",
    "--crash-loop": "3/1s",
    "--join-timeout": "7s",
    "--last-call": "7s",
    "--replacement-timeout": "7s",
    "--shrink-after": "7s",
    "--shutdown-timeout": "7s",
    "--spares": "1",
    "--scale-up": "never",
    "--failure-policy": "hang=fail",
    "--stragglers": "off",
    "--recover": "restart",
    "--max-heals": "7",
}


def spec_of(*words: str) -> JobSpec:
    line = read_arguments(["--rdzv-id", "job", *words, "train.py"])
    settings = merge(line, {}, ConfigFile())
    here = HostEnvironment(nproc=2, python="python", stamp="1")
    return assemble(settings, entry_point(settings, line.words), here)[0].job


@pytest.mark.parametrize(("option", "value"), AGREED.items())
def test_a_node_that_differs_in_one_option_is_told_which(option: str, value: str) -> None:
    story = Story(spec_of("--nnodes", "2:4")).joins("a")
    (refused,) = story.joins("b", job=spec_of("--nnodes", "2:4", option, value)).told("b")
    assert isinstance(refused, Refused)
    assert refused.kind is RefusalKind.DISAGREEMENT
    assert refused.disagreement is not None
    assert KNOWN_AS[refused.disagreement.setting].split()[0] == option
    assert refused.exit_code == 78


def test_every_field_of_the_spec_has_a_name_and_every_option_is_tried() -> None:
    assert list(KNOWN_AS) == [field.name for field in fields(JobSpec)]
    named = {option for words in KNOWN_AS.values() if (option := words.split()[0]).startswith("--")}
    assert named <= BY_SPELLING.keys()
    assert named == {*AGREED, "--rdzv-id"}  # another id is another job


def test_nodes_that_wait_learn_that_another_was_rejected_and_why() -> None:
    story = Story(spec_of("--nnodes", "2")).joins("a")
    (refused,) = story.joins("b", job=spec_of("--nnodes", "2", "--max-restarts", "7")).told("b")
    assert isinstance(refused, Refused)
    (notice,) = story.told("a")
    assert isinstance(notice, Notice)
    assert all(part in notice.text for part in ("b", refused.reason))


def test_few_of_many_nodes_that_wait_learn_of_a_rejection() -> None:
    job = spec_of("--nnodes", "64")
    story = Story(job).joins(*(f"n{n}" for n in range(40)))
    story.joins("wrong", job=spec_of("--nnodes", "64", "--max-restarts", "7"))
    assert 1 < len(story.effects) < 12


def test_a_rejection_is_not_reported_to_a_job_that_runs() -> None:
    story = Story(spec_of("--nnodes", "2")).joins("a", "b")
    story.joins("c", job=spec_of("--nnodes", "2", "--max-restarts", "7"))
    assert story.told("a") == []
    story = Story(spec_of("--nnodes", "2")).joins("a").joins("a")
    assert all(isinstance(message, Waiting) for message in story.told("a"))
