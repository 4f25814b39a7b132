"""`ddp-launch --web`: the page of the job at hand, on one machine and at a service."""

from __future__ import annotations

import getpass
import re
from typing import TYPE_CHECKING

from launched import Launched, eventually
from paging import Client, Site, job_at
from test_ddpctl_questions import SCRIPT
from test_page_api import until

if TYPE_CHECKING:
    from pathlib import Path


def page_of(job: Launched) -> Client:
    found = eventually(lambda: re.search(r"for one login: (\S+)#login=(\S+)", job.stderr()), what="the URL")
    client = Client(found[1])
    assert client.login(found[2])[0] == 200
    assert Client(found[1]).login(found[2])[0] == 401  # it was used
    return client


def test_a_job_on_one_machine(tmp_path: Path) -> None:
    words = ("--web", "--nproc-per-node", "2", "--rdzv-id", "alone", "--max-restarts", "1", "SCRIPT", "watch")
    job = Launched(tmp_path, *words, source=SCRIPT, fake_torch="")
    try:
        client = page_of(job)
        session = client.get("session")[1]
        assert (session["only"], session["may_control"]) == ("alone", True)
        assert session["name"] == f"user {getpass.getuser()}"
        with client.events("alone") as events:
            until(events, "ranks", lambda ranks: len(ranks["rows"]) == 2)
            assert client.get("why", job="another")[0] == 404
            assert client.post("order", job="another", action="abort")[0] == 404
            assert client.post("order", job="alone", action="restart", reason="try")[0] == 200
            _, note = until(events, "note", lambda note: note["kind"] == "decision")
            assert f"try (on the page) (ordered by user {getpass.getuser()})" in note["text"]
            until(events, "job", lambda view: view["generation"] == 2 and view["phase"] == "running")
        assert client.post("order", job="alone", action="abort", reason="enough")[0] == 200
        assert job.wait() != 0
        assert "internal error" not in job.stderr()
        job.assert_nothing_left()
    finally:
        job.clean_up()


def test_a_job_at_a_service_with_the_token_of_its_agents(shared: Site) -> None:
    """The token may not control jobs, so the page only shows this one."""
    with job_at(shared, "of-a-team", "--web") as job:
        client = page_of(job)
        session = client.get("session")[1]
        assert (session["only"], session["role"], session["may_control"]) == ("of-a-team", "agent", False)
        with client.events("of-a-team") as events:
            until(events, "ranks", lambda ranks: len(ranks["rows"]) == 2)
        lines = client.post("logs", job="of-a-team", ranks=[0], tail=5)[1]["lines"]
        assert "first line of rank 0" in [line["text"] for line in lines]
        assert client.post("order", job="of-a-team", action="abort")[0] == 403
        assert job.agent.poll() is None
