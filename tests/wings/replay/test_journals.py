"""Journals on disk, and `ddpctl replay`: the same decisions, other settings, damaged files, and what is left out."""

from __future__ import annotations

import json
import os
import random
import threading
import time
import zlib
from typing import TYPE_CHECKING, Any

import pytest
from job_story import Story, agent, spec

from ddp_launch_wings.replay.report import JournalFile
from ddp_launch_wings.replay.what_if import BadChange, parse
from rendezvous.control import ctl
from rendezvous.replay import journal
from rendezvous.replay.journal import Journal, JournalFolder, Journals, journal_of, service_machine
from rendezvous.replay.records import MAGIC
from rendezvous.rounds.admission import renew_leases, resume
from rendezvous.values.error_codes import Code
from rendezvous.values.events import (
    DeadlineReached,
    Event,
    NodeDrained,
    NodeHealth,
    PhaseTimesReported,
    RankTimesReported,
    SetDeadline,
)
from rendezvous.values.rank_time import PhaseTimes, RankTime, TimeSpent
from rendezvous.values.types import FailureClass

if TYPE_CHECKING:
    from pathlib import Path

    from rendezvous.values.types import JobSpec

SECRETS = ("hunter2", "my-secret-job", "train_secret.py", "sk-12345", "/home/ann")
Output = pytest.CaptureFixture[str]


class RecordedStory(Story):
    def __init__(self, job: JobSpec, journal: Journal) -> None:
        super().__init__(job)
        self._journal = journal
        before = self.state
        self.state, effects = resume(before, self.now)
        journal.loaded(before, self.now, effects, self.state)

    def happens(self, event: Event) -> Story:
        super().happens(event)
        self._journal.took(event, self.now, self.effects, self.state)
        return self

    def passes_without(self, seconds: float, *silent: str) -> None:
        """Every deadline is reached, and these nodes are not heard any more."""
        end = self.now + seconds
        while self.deadline is not None and self.deadline <= end:
            self.now = self.deadline
            beats = {m.agent: self.now for node, m in self.state.members.items() if node not in silent}
            self.state = renew_leases(self.state, beats)
            self._journal.heard(beats)
            self.happens(DeadlineReached())
        self.now = end


class Kept:
    """A journal in a folder, and the story that it tells."""

    def __init__(self, folder: Path, job: JobSpec, limit: int = 1 << 20) -> None:
        self.warnings: list[str] = []
        self.journals = Journals(str(folder), limit, self.warnings.append)
        self._journal = journal_of(self.journals, job.job_id)
        self.story = RecordedStory(job, self._journal)
        self.path = folder / f"journal_service_{job.job_id}.ddpj"

    def close(self) -> str:
        self._journal.end()
        self.journals.close()
        assert not self.warnings
        return str(self.path)


def lost_node(folder: Path) -> str:
    """The second of two nodes falls silent, and the job waits for another one."""
    kept = Kept(folder, spec(2, lease_s=4.0))
    kept.story.joins("a", "b").runs()
    kept.story.passes_without(10.0)
    kept.story.passes_without(6.0, "b")
    kept.story.stop("a")
    return kept.close()


def failed_rank(folder: Path) -> str:
    kept = Kept(folder, spec(2, lease_s=4.0))
    kept.story.joins("a", "b").runs()
    kept.story.passes_without(5.0)
    kept.story.fails("b", 3).stop("a", "b").runs().finish("a", "b")
    return kept.close()


def replay(capsys: Output, *words: str) -> tuple[int, str, str]:
    code = ctl.main(["replay", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


# --- the same again ------------------------------------------------------------------------------------


def test_the_decisions_are_made_again_step_by_step(tmp_path: Path, capsys: Output) -> None:
    code, out, err = replay(capsys, failed_rank(tmp_path))
    assert (code, err) == (0, "")
    assert "RankFailed b generation 1 rank 3 user-exception | stop generation 1: restart -> a, b" in out
    assert "the job has succeeded -> a, b" in out
    assert "same decisions: 11 of 11" in out


def test_steps_that_answer_nothing_are_left_out(tmp_path: Path, capsys: Output) -> None:
    path = lost_node(tmp_path)
    few, many = (replay(capsys, path, *words)[1] for words in ((), ("--all",)))
    assert "DeadlineReached | -" in many
    assert "DeadlineReached | -" not in few


def test_for_programs(tmp_path: Path, capsys: Output) -> None:
    code, out, _ = replay(capsys, failed_rank(tmp_path), "-o", "json")
    found = json.loads(out)
    assert code == 0
    assert (found["machine"], found["steps"], found["same"], found["complete"]) == ("service", 11, 11, True)
    stop = next(each for each in found["decisions"] if each["event"].startswith("RankFailed"))
    assert stop["answers"][0]["what"] == "stop generation 1: restart"
    assert stop["answers"][0]["nodes"] == ["a", "b"]


def with_another_decision(lines: list[bytes]) -> list[bytes]:
    at = next(n for n, line in enumerate(lines) if n and b'"RankFailed"' in line)
    record = json.loads(lines[at])
    return [*lines[:at], json.dumps([*record[:3], record[3] ^ 1]).encode(), *lines[at + 1 :]]


def test_another_decision_is_found(tmp_path: Path, capsys: Output) -> None:
    path = failed_rank(tmp_path)
    pack(path, with_another_decision(unpacked(path)))
    code, out, err = replay(capsys, path)
    assert code == 1
    assert "same decisions: 10 of 11\nfirst difference: step 6" in out
    assert "DIFFERENT" in out
    assert err.rstrip().endswith(f"[{Code.DECISIONS_DIFFER}]")


def test_a_file_that_follows_begins_with_the_state(tmp_path: Path, capsys: Output) -> None:
    kept = Kept(tmp_path, spec(2, restarts=1000, lease_s=4.0), limit=2000)
    kept.story.joins("a", "b").runs()
    for _ in range(250):
        kept.story.passes_without(90.0)
        kept.story.fails("b", 3).stop("a", "b").runs()
    path = kept.close()
    before = path.replace(".ddpj", ".1.ddpj")
    assert {str(each) for each in tmp_path.iterdir()} == {path, before}
    for each in (before, path):
        code, out, err = replay(capsys, each)
        assert (code, err) == (0, ""), each
        assert unpacked(each)[1].startswith(b'["start"')
        assert "DIFFERENT" not in out


def test_a_second_process_does_not_overwrite_the_journal_of_the_first(tmp_path: Path) -> None:
    failed_rank(tmp_path)
    failed_rank(tmp_path)
    assert {each.name for each in tmp_path.iterdir()} == {
        "journal_service_job.ddpj",
        "journal_service_job-2.ddpj",
    }
    journals = Journals(str(tmp_path), 1 << 20, print)
    (tmp_path / "journal_service_job2.ddpj").write_bytes(b"")  # of another job
    journals.remove("journal_service_job")
    assert [each.name for each in tmp_path.iterdir()] == ["journal_service_job2.ddpj"]


def test_a_job_that_is_only_read_has_no_journal(tmp_path: Path) -> None:
    kept = Kept(tmp_path, spec(2))
    kept.close()
    assert list(tmp_path.iterdir()) == []


def test_jobs_that_end_together_keep_no_files_open(tmp_path: Path) -> None:
    """The thread pauses before a batch, and not before each end: they would take a second each."""
    journals, pauses = Journals(str(tmp_path), 1 << 20, print), 0

    class Hurry(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            nonlocal pauses
            pauses += 1
            return super().wait(60)  # until `close`

    journals._hurry = Hurry()
    kept = [journal_of(journals, f"job-{number}") for number in range(30)]
    for each in kept:
        RecordedStory(spec(2), each).joins("a", "b")
    for each in kept:
        each.end()
    journals.close(60)
    assert journals.room._written == set()
    assert pauses == 1


def test_a_full_disk_ends_the_journal_with_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = Kept(tmp_path / "file", spec(2))
    kept.story.joins("a", "b").runs()
    kept.journals.close()
    (warning,) = kept.warnings
    assert "ends here" in warning


# --- the size of a folder ------------------------------------------------------------------------------


def aged(path: Path, size: int, seconds_ago: float) -> Path:
    path.write_bytes(bytes(size))
    at = time.time() - seconds_ago
    os.utime(path, (at, at))
    return path


def test_the_oldest_journals_make_room(tmp_path: Path) -> None:
    """Of jobs that another replica has removed, say. Other files stay, whatever their age."""
    old = aged(tmp_path / "journal_service_old.ddpj", 600, 300.0)
    new = aged(tmp_path / "journal_service_new.1.ddpj", 600, 100.0)
    other = aged(tmp_path / "jobs.db", 6000, 900.0)
    room = JournalFolder(str(tmp_path), 1000)
    room.takes(0)
    assert [path.exists() for path in (old, new, other)] == [False, True, True]


def test_a_journal_that_is_written_stays(tmp_path: Path) -> None:
    written = aged(tmp_path / "journal_service_a.ddpj", 900, 300.0)
    ended = aged(tmp_path / "journal_service_b.ddpj", 900, 100.0)
    room = JournalFolder(str(tmp_path), 1000)
    room.opens(str(written))
    room.takes(0)
    assert (written.exists(), ended.exists()) == (True, False)
    aged(written, 1001, 0.0)
    with pytest.raises(OSError, match="--journal-space"):
        room.takes(1 << 20)
    with pytest.raises(OSError, match="--journal-space"):
        room.takes(1)  # there is no room until a journal has ended
    room.closes(str(written))
    room.takes(1)
    assert not written.exists()


def test_running_jobs_that_need_too_much_lose_their_journals_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_LOOK_AGAIN", 1)
    warnings: list[str] = []
    journals = Journals(str(tmp_path), 1 << 20, warnings.append, space=1)
    stories = [RecordedStory(spec(2), journal_of(journals, name)) for name in ("one", "two")]
    for story in stories:
        story.joins("a", "b").runs()
        story.fails("b", 3).stop("a", "b").runs().finish("a", "b")
    journals.close()
    assert [story.state.phase.value for story in stories] == ["ended", "ended"]
    assert len(warnings) == 2
    for warning in warnings:
        assert "--journal-space" in warning
        assert "The job continues without it" in warning
    assert len(list(tmp_path.iterdir())) == 1  # that of the first one made room for the second


# --- what if -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (("max-restarts=0",), ("stop generation 1: restart", "stop generation 1: fail")),
        (("failure-policy=user-exception=fail",), ("stop generation 1: restart", "stop generation 1: fail")),
        (("max-restarts=0", "failure-policy=user-exception=ignore"), ("stop generation 1: restart", "")),
        (("lease=9s",), None),
        (("spares=+1",), None),
    ],
)
def test_what_if_a_rank_fails(
    changes: tuple[str, ...], expected: tuple[str, str] | None, tmp_path: Path, capsys: Output
) -> None:
    words = [word for change in changes for word in ("--what-if", change)]
    code, out, _ = replay(capsys, failed_rank(tmp_path), *words, "-o", "json")
    found = json.loads(out)
    assert code == 0
    assert found["parts"] is (expected is not None)
    if expected is not None:
        recorded, other = ([d["what"] for d in (found[key] or {}).get("decisions", [])] for key in SIDES)
        assert recorded == [expected[0]]
        assert other == [each for each in expected[1:] if each] or not expected[1]


SIDES = ("recorded", "what_if")


def what_if(capsys: Output, path: str, *changes: str) -> list[tuple[float, list[str]]]:
    words = [word for change in changes for word in ("--what-if", change)]
    _, out, _ = replay(capsys, path, *words, "-o", "json")
    found = json.loads(out)
    sides: list[Any] = [found[key] for key in SIDES]
    return [(side["at_s"], [each["what"] for each in side["decisions"]]) for side in sides]


def test_what_if_one_more_node_stands_by(tmp_path: Path, capsys: Output) -> None:
    recorded, other = what_if(capsys, lost_node(tmp_path), "spares=+1")
    assert recorded[1] == ["stop generation 1: wait-for-replacement"]
    assert other == (recorded[0], ["stop generation 1: restart-with-spare"])


@pytest.mark.parametrize("lease_s", [2.0, 9.0])
def test_what_if_the_lease_is_another(lease_s: float, tmp_path: Path, capsys: Output) -> None:
    recorded, other = what_if(capsys, lost_node(tmp_path), f"lease={lease_s:g}s")
    assert recorded[1] == other[1] == ["stop generation 1: wait-for-replacement"]
    assert other[0] - recorded[0] == pytest.approx(lease_s - 4.0, abs=0.5)


@pytest.mark.parametrize(
    "change",
    [
        *("lease", "lease=soon", "leases=4", "spares=+x", "nnodes=3:2", "recover=maybe", "max-restarts=3/x"),
        *("failure-policy=hang", "failure-policy=hang:3=fail", "lease=0", "spares=+999"),
    ],
)
def test_a_change_that_is_none_is_refused(change: str, tmp_path: Path, capsys: Output) -> None:
    with pytest.raises(BadChange):
        parse([change])
    code, _, err = replay(capsys, failed_rank(tmp_path), "--what-if", change)
    assert code == 2
    assert err.startswith("ddpctl: --what-if ")
    assert err.rstrip().endswith(f"[{Code.INVALID_VALUE}]")


# --- files that are not whole --------------------------------------------------------------------------


def unpacked(path: str) -> list[bytes]:
    file = JournalFile(path)
    with open(path, "rb") as packed:
        first = zlib.decompressobj().decompress(packed.read()[len(MAGIC) :]).split(b"\n")[0]
    return [first, *file.lines()]


def pack(path: str, lines: list[bytes], magic: bytes = MAGIC) -> None:
    with open(path, "wb") as file:
        file.write(magic + zlib.compress(b"".join(line + b"\n" for line in lines)))


def test_what_is_readable_of_a_damaged_file_is_replayed(tmp_path: Path, capsys: Output) -> None:
    kept = Kept(tmp_path, spec(2, restarts=1000, lease_s=4.0))
    kept.story.joins("a", "b").runs()
    for _ in range(200):
        kept.story.passes_without(90.0)
        kept.story.fails("b", 3).stop("a", "b").runs()
    path = kept.close()
    whole = kept.path.read_bytes()
    middle = len(whole) * 2 // 3
    for damaged in (whole[:middle] + bytes(64) + whole[middle + 64 :], whole[:-3] + b"\0\0\0"):
        kept.path.write_bytes(damaged)
        code, out, err = replay(capsys, path)
        assert code == 2
        assert "RankFailed b generation 1" in out
        assert "the journal is readable up to step " in err
        assert err.rstrip().endswith(f"[{Code.JOURNAL_UNREADABLE}]")


def test_steps_before_a_damage_may_be_damaged_too(tmp_path: Path, capsys: Output) -> None:
    """Damaged data can be decompressed for a while, and then the recorded answers differ."""
    path = failed_rank(tmp_path)
    lines = with_another_decision(unpacked(path))
    pack(path, [*lines[:-1], b'["do'])
    code, out, err = replay(capsys, path)
    assert code == 2
    assert "DIFFERENT" in out
    assert err.rstrip().endswith(f"[{Code.JOURNAL_UNREADABLE}]")


def test_a_cut_file_is_replayed_and_said_to_have_no_end(tmp_path: Path, capsys: Output) -> None:
    path = failed_rank(tmp_path)
    whole = (tmp_path / "journal_service_job.ddpj").read_bytes()
    (tmp_path / "journal_service_job.ddpj").write_bytes(whole[:-9])
    code, out, err = replay(capsys, path)
    assert code == 0
    assert "RankFailed" in out
    assert err == (
        "ddpctl: the journal has no end: its process still runs, or was killed; the last second may be missing\n"
    )


def test_files_of_other_releases_and_other_files(tmp_path: Path, capsys: Output) -> None:
    path = failed_rank(tmp_path)
    lines = unpacked(path)
    header = json.loads(lines[0])
    header["schema"]["JobSpec"].append("a_new_setting")
    cases = {
        b"ddp-journal 2\nxyz": "has format 2, and this release reads format 1",
        b'{"a": 1}': "is not a journal",
        b"": "is not a journal",
        MAGIC: "it is empty",
        MAGIC + b"not compressed": "is damaged",
    }
    for content, words in cases.items():
        (tmp_path / "x.ddpj").write_bytes(content)
        code, _, err = replay(capsys, str(tmp_path / "x.ddpj"))
        assert (code, words in err, err.rstrip()[-10:]) == (2, True, f"[{Code.JOURNAL_UNREADABLE}]"), err
    pack(path, [json.dumps(header | {"release": "9.9.9"}).encode(), *lines[1:]])
    code, _, err = replay(capsys, path)
    assert code == 2
    assert "JobSpec has no field a_new_setting here (written by release 9.9.9" in err


@pytest.mark.parametrize(
    "line",
    [
        *(
            b"[]",
            b'["do",1,["NoSuchEvent",[]],1]',
            b'["do",1,["AgentHeard",[[1,2]]],1]',
            b"\xff",
            b"[" * 100_000,
        ),
        *(
            b'["do","now",["DeadlineReached",[]],1]',
            b'["hear",[[1]]]',
            b'["load",1,null,"x"]',
            b'["start",1,[]]',
        ),
    ],
)
def test_a_line_that_no_machine_has_written(line: bytes, tmp_path: Path, capsys: Output) -> None:
    path = failed_rank(tmp_path)
    pack(path, [*unpacked(path), line])
    code, out, err = replay(capsys, path)
    assert code == 2
    assert "same decisions: 11 of 11" in out
    assert "the journal is readable up to step 11" in err


def test_no_such_file(tmp_path: Path, capsys: Output) -> None:
    code, _, err = replay(capsys, str(tmp_path / "none.ddpj"))
    assert code == 2  # as any file of an argument: docs/exit-codes.md
    assert err.rstrip().endswith(f"[{Code.FILE_UNREADABLE}]")


# --- what is left out ----------------------------------------------------------------------------------


def test_no_text_of_the_script_or_of_a_person_is_in_the_file(tmp_path: Path, capsys: Output) -> None:
    job = spec(2, entry_point="train_secret.py --key sk-12345")
    kept = Kept(tmp_path, job)
    kept.story.joins("a", "b", script_args="sk-12345", health_note="hunter2").runs()
    for number, text in enumerate(SECRETS):
        kept.story.happens(NodeHealth(agent("a"), text, (text,), text))
        more = {"reason": text, "traceback": f"File {text}", "log": text, "hint": text, "place": text}
        kept.story.fails("b", 3, FailureClass.USER_EXCEPTION, **more).stop("a", "b").runs()
        kept.story.happens(NodeDrained("c" if number else "b", text))
        kept.story.stop("a", "b")
    path = kept.close()
    content = b"\n".join(unpacked(path)).decode()
    assert [text for text in SECRETS if text in content] == []
    code, out, _ = replay(capsys, path, "--all")
    assert code == 0
    assert [text for text in SECRETS if text in out] == []


def test_an_hour_of_a_node_takes_less_than_a_megabyte(tmp_path: Path) -> None:
    """Of a job of 4 nodes with 8 ranks each that trains. All that the service receives then is sent at intervals."""
    nodes, minutes, draw = 4, 6, random.Random(5)
    file = journal._File(Journals(str(tmp_path), 1 << 30, print), "x", service_machine(), b"key")
    members = [agent(f"gpu-node-{number:04}") for number in range(nodes)]
    spent = {(node, rank): TimeSpent() for node in range(nodes) for rank in range(8)}
    for second in range(minutes * 60):
        now = 1000.0 + second + draw.random()
        for number, member in enumerate(members):
            if second % 5 == number:  # launcher/health/time_watch.py
                times = [_trained(spent, number, rank, draw) for rank in range(8)]
                ranks = tuple(RankTime(8 * number + i, each, second * 3) for i, each in enumerate(times))
                file.write(file.scribe.do(RankTimesReported(member, ranks), now, ()))
            if second % 20 == number:  # the window of --stragglers
                phases = [PhaseTimes(8 * number + i, second * 3, *_drawn(draw, 6)) for i in range(8)]
                file.write(file.scribe.do(PhaseTimesReported(member, 1, tuple(phases)), now, ()))
        if second % 3 == 0:  # with the usual lease of 4 s and a heartbeat each second
            file.write(file.scribe.hear({member: now - draw.random() for member in members}))
            file.write(file.scribe.do(DeadlineReached(), now, (SetDeadline(now + 3.0),)))
        file.flush()
    file.close()
    per_node_and_hour = (tmp_path / "x.ddpj").stat().st_size / nodes * 60 / minutes
    assert per_node_and_hour < 1_000_000


def _drawn(draw: random.Random, count: int) -> list[float]:
    return [draw.random() * 100 for _ in range(count)]


def _trained(spent: dict[tuple[int, int], TimeSpent], node: int, rank: int, draw: random.Random) -> TimeSpent:
    """Five more seconds."""
    found = spent[node, rank]
    for name in ("data", "forward", "backward", "communication", "optimizer", "idle"):
        found = found.plus(name, draw.random())
    spent[node, rank] = found
    return found
