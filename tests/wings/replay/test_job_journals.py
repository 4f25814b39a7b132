"""The journals of a real job: they replay to the same decisions, and contain no words of anybody."""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING, Any

from rendezvous.control import ctl

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest
    from launched import Launch

SECRETS = ("hunter2", "walrus", "marmalade")
FAILS = """
import os, sys
print("walrus of the output")
sys.stderr.write("walrus of the errors\\n")
raise ValueError("walrus " + os.environ["MY_PASSWORD"] + " " + sys.argv[1])
"""


def journals(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in folder.rglob("*.ddpj")}


def content(path: Path) -> str:
    return zlib.decompressobj().decompress(path.read_bytes().partition(b"\n")[2]).decode()


def replayed(path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert ctl.main(["replay", str(path), "-o", "json", *words]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return json.loads(said.out)


def lines(found: Any) -> Iterator[str]:
    return (line["what"] for step in found["decisions"] for line in step["answers"])


def test_a_failed_job_leaves_journals_that_replay(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--nproc-per-node", "2", "--max-restarts", "1", "--rdzv-id", "marmalade", "SCRIPT", "marmalade")
    job = launch(*words, source=FAILS, fake_torch="", env={"MY_PASSWORD": "hunter2"})
    assert job.wait() == 1, job.stderr()
    found = journals(job.temp)
    (service,) = (path for name, path in found.items() if name.startswith("journal_service_"))
    (agent,) = (path for name, path in found.items() if name.startswith("journal_agent_"))
    for path in (service, agent):
        result = replayed(path, capsys)
        assert result["steps"] == result["same"] > 5
        assert result["complete"]
        assert [secret for secret in SECRETS if secret in content(path)] == []
    assert "stop generation 1: restart" in lines(replayed(service, capsys))
    assert "Finish exit code 1 exit code 1" in lines(replayed(agent, capsys))
    other = replayed(service, capsys, "--what-if", "max-restarts=0")
    assert other["what_if"]["decisions"][0]["what"] == "stop generation 1: fail"
    assert ctl.main(["replay", str(agent), "--what-if", "max-restarts=0"]) == 2
    assert "is the journal of an agent" in capsys.readouterr().err


def test_no_journal(launch: Launch, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    for words, expected in ((("--no-journal",), 0), ((), 2)):
        job = launch(*words, "--log-dir", str(logs), "--no-python", "/bin/true")
        assert job.wait() == 0, job.stderr()
        assert len(journals(logs)) == expected
