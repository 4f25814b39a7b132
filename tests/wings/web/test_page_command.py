"""`ddpctl page`: the page shows the jobs of this machine that no service has, also after their end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

from paging import Client
from test_page_api import until

if TYPE_CHECKING:
    from launched import Launch

SCRIPT = "import os, sys\nprint('a line of rank', os.environ['RANK'])\nsys.exit(os.environ['DDP_GENERATION'] == '1')"
PAGE = "import sys; from _ddp_launch_entry import ddpctl; sys.exit(ddpctl())"


def test_a_finished_job_has_the_views_of_a_running_one(launch: Launch, runtime: str) -> None:
    env = {"XDG_RUNTIME_DIR": runtime, "DDP_LAUNCH_HISTORY_DIR": f"{runtime}/history"}
    words = ("--nproc-per-node", "2", "--max-restarts", "1", "--preflight", "off", "--rdzv-id", "over")
    assert launch(*words, source=SCRIPT, fake_torch="", env=env).wait() == 0
    command = [sys.executable, "-c", PAGE, "page"]
    page = subprocess.Popen(command, env=os.environ | env, stdout=subprocess.PIPE, text=True)
    try:
        assert page.stdout is not None
        found = re.search(r"login: (\S+)#login=(\S+)", page.stdout.readline())
        assert found is not None
        client = Client(found[1])
        assert client.login(found[2])[0] == 200
        (job,) = client.get("jobs")[1]["jobs"]
        assert (job["job"], job["phase"], job["restarts"]) == ("over", "succeeded", 1)
        assert job["ended_at"] > job["began_at"] > 1.7e9
        with client.events("over") as events:
            _, all_of_it = until(events, "snapshot", lambda _: True)
            assert all_of_it["job"]["is_over"]
            if "ended" not in {note["kind"] for note in all_of_it["notes"]}:
                until(events, "note", lambda note: note["kind"] == "ended")
        assert client.get("why", job="over")[1]["generation"] == 1
        lines = client.post("logs", job="over", ranks=[], tail=9)[1]["lines"]
        assert {line["text"] for line in lines} == {"a line of rank 0", "a line of rank 1"}
        assert client.post("order", job="over", action="restart", reason="x")[0] == 409
    finally:
        page.terminate()
        page.communicate(timeout=60)
    assert page.returncode == 0
