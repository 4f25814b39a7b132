"""The page in a real browser: a person watches a job, reads why it failed, and ends it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from chromium import chromium, keep, main_thread_of, opened, severe_problems
from launched import Launched, eventually
from paging import Site, job_at, site
from playwright.sync_api import Page, expect
from simulated import Simulation, simulated_page

from rendezvous.access.auth import Role

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser

expect.set_options(timeout=60_000)
DDPCTL = (sys.executable, "-m", "rendezvous.control.ctl")
LARGE = Simulation("llama-7b", 1024, slow=(37, 611), hung=(812,))
LOOP = "() => { let x = 0; for (let i = 0; i < 1e7; i++) x = (x * 31 + i) | 0; return x; }"
HIDDEN_TOO = re.compile(r"Exposed .* %, Hidden \d+ %, Waiting")
JOBS = (LARGE, Simulation("resnet", 16, slow=(11,)), Simulation("mnist", 1, per_node=1))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture(scope="module")
def simulated() -> Iterator[Any]:
    """A function that gives the URL of a page with simulated jobs, for one login."""
    with simulated_page(*JOBS) as urls:
        yield urls


def log_in(page: Page, token: str) -> None:
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Log in").click()


def press(page: Page, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()


def test_from_the_start_of_a_job_to_its_end(browser: Browser, served: Site, tmp_path: Path) -> None:
    """Watch a job start, look at a rank, tail the output, kill a rank and read its story, lose the service, abort."""
    with opened(browser, served.url) as page:
        log_in(page, "not.a.token")
        expect(page.get_by_role("alert")).to_contain_text("this service does not have")
        log_in(page, served.token(Role.OPERATOR))
        expect(page.get_by_text("No jobs yet")).to_be_visible()
        with job_at(served, "seen", "--max-restarts", "3") as job:
            page.get_by_role("link", name="seen").click()
            expect(page.locator(".head .badge")).to_have_text("running")
            expect(page.get_by_role("button", name="Rank 1: details")).to_be_visible()
            look_at_a_rank(page)
            tail_the_output(page, job.there / "q-hello")
            kill_a_rank(page, served)
            restart_the_ranks(page)
            lose_the_service(page, served)
            see_charts(page)
            press(page, "Abort")
            page.get_by_label("Reason").fill("seen enough")
            keep(page, "abort", tmp_path)
            press(page, "Abort seen")
            expect(page.locator(".head .badge")).to_have_text("failed")
            expect(
                page.locator(".events").get_by_text("seen enough (on the page) (ordered by token ").first
            ).to_be_visible()
            expect(page.get_by_role("button", name="Abort", exact=True)).to_be_hidden()
            assert job.wait() != 0
        lose_all_but_the_store(page, served)


def lose_all_but_the_store(page: Page, served: Site) -> None:
    assert served.service.end(signal.SIGTERM) == 0
    served.start()
    page.reload()
    expect(page.locator(".head .badge")).to_have_text("failed")
    see_charts(page)


def see_charts(page: Page) -> None:
    for chart in ("Throughput", "Step time", "Goodput"):
        expect(page.get_by_role("img", name=re.compile(rf"{chart}: .*\d"))).to_be_visible()


def look_at_a_rank(page: Page) -> None:
    """With the keyboard only."""
    page.locator("canvas.map").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    panel = page.get_by_label("Selected rank")
    expect(panel.get_by_role("heading", name="Rank 1")).to_be_visible()
    expect(page.locator("#announcer")).to_contain_text("rank 1 on ")
    press(page, "Last step")
    expect(panel.get_by_role("img", name="Phases: ")).to_be_visible()
    press(page, "Stacks")
    expect(page.get_by_role("dialog")).to_contain_text("a_function_to_find")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)


def tail_the_output(page: Page, order: Path) -> None:
    output = page.get_by_label("Output", exact=True)
    expect(output.get_by_text("first line of rank 0")).to_be_visible()
    page.get_by_label("Ranks, such as").fill("x")
    press(page, "Show")
    expect(output.get_by_role("status")).to_contain_text("“x” is not a rank")
    page.get_by_label("Ranks, such as").fill("1")
    press(page, "Show")
    expect(output.get_by_text("first line of rank 1")).to_be_visible()
    expect(output.get_by_text("first line of rank 0")).to_have_count(0)
    order.write_text("")
    expect(output.get_by_text("q-hello from rank 1")).to_be_visible()


def kill_a_rank(page: Page, served: Site) -> None:
    os.kill(served.client().get("rank", job="seen", rank="1")[1]["pid"], signal.SIGKILL)
    page.get_by_role("button", name="Story of generation 1").click()
    story = page.get_by_role("dialog")
    expect(story).to_contain_text("rank 1 on ")
    expect(story).to_contain_text("SIGKILL")
    expect(story).to_contain_text("restart")
    assert not severe_problems(page)
    page.keyboard.press("Escape")
    expect(page.locator(".head .badge")).to_have_text("running")
    expect(page.locator(".head")).to_contain_text("generation 2")


def restart_the_ranks(page: Page) -> None:
    page.evaluate("document.querySelector('.events li').isKept = true")
    press(page, "Restart")
    page.get_by_label("Reason").fill("a better loss")
    press(page, "Restart seen")
    expect(page.locator("#announcer")).to_contain_text("Restart seen: done")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.locator(".head")).to_contain_text("generation 3")
    expect(page.locator(".head .badge")).to_have_text("running")
    expect(page.locator(".events").get_by_text("a better loss (on the page)").first).to_be_visible()
    # What is under the mouse is not replaced when something happens: a click on it would be lost.
    assert page.evaluate("[...document.querySelectorAll('.events li')].some((each) => each.isKept)")


def lose_the_service(page: Page, served: Site) -> None:
    page.evaluate("window.hasNotReloaded = true")
    assert served.service.end(signal.SIGTERM) == 0
    expect(page.get_by_text("Connection lost")).to_be_visible()
    served.start()
    expect(page.get_by_text("Connection lost")).to_be_hidden()
    step = page.locator(".tile dd").first
    before = step.inner_text()
    expect(step).not_to_have_text(before)
    assert page.evaluate("window.hasNotReloaded") is True


SLOW = """
import sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    time.sleep((0.1, 0.1, 0.17)[dist.get_rank()])
"""


@pytest.mark.nightly(instead=("core/test_stragglers.py", "shell/test_node_health.py"))
def test_a_rank_that_the_others_wait_for_is_marked_in_all_views(browser: Browser, tmp_path: Path) -> None:
    """All ranks take as long per step. Their own times differ."""
    words = ("--web", "--nproc-per-node", "3", "--rdzv-id", "slow", "--preflight", "off", "SCRIPT")
    job = Launched(tmp_path, *words, source=SLOW)
    try:
        url = eventually(lambda: re.search(r"for one login: (\S+)", job.stderr()), what="the URL")[1]
        with opened(browser, url) as page:
            row = page.locator(".ranks tbody tr").first  # the worst one comes first
            expect(row).to_contain_text("that of its peers")
            expect(row.get_by_role("button", name="Rank 2: details")).to_be_visible()
            expect(page.locator(".ranks .badge.good")).to_have_count(2)
            expect(page.get_by_text("well 2", exact=True)).to_be_visible()
            page.locator("canvas.map").focus()
            for key in ("Home", "ArrowRight", "ArrowRight"):
                page.keyboard.press(key)
            expect(page.locator("#announcer")).to_contain_text(
                re.compile(r"rank 2 on .*, own time 1\.\d\d× that of")
            )
            named = page.get_by_label("Selected rank").get_by_text("is slower than its peers")
            expect(named).to_contain_text("rank 2 on ")
            keep(page, "slow", tmp_path)
        table = subprocess.run([*DDPCTL, "top", "slow", "--once"], capture_output=True, text=True, timeout=60)
        assert re.search(r"^ +2 .* 1\.\d\dx", table.stdout, re.MULTILINE), table
    finally:
        job.clean_up()


def test_a_token_that_may_only_look(browser: Browser, served: Site) -> None:
    with job_at(served, "looked-at") as job, opened(browser, f"{served.url}#/job/looked-at") as page:
        log_in(page, served.token(Role.VIEWER, "looked-*"))
        page.get_by_role("button", name="Rank 0: details").click()
        expect(page.get_by_role("button", name="Stacks")).to_be_visible()
        for name in ("Abort", "Restart", "Take a checkpoint", "Drain node"):
            expect(page.get_by_role("button", name=name)).to_have_count(0)
        status = page.evaluate(
            """async () => {
              const { csrf } = await (await fetch("api/session")).json();
              const headers = { "content-type": "application/json", "x-ddp-csrf": csrf };
              const body = JSON.stringify({ job: "looked-at", action: "abort" });
              return (await fetch("api/order", { method: "POST", headers, body })).status;
            }"""
        )
        assert status == 403
        page.goto(f"{served.url}#/job/seen")
        expect(page.get_by_text("not for job 'seen'")).to_be_visible()
        assert job.agent.poll() is None


def test_what_a_job_says_is_only_text(browser: Browser, simulated: Any) -> None:
    """No script, no style and no markup of a text is used; and the policy would refuse it."""
    with opened(browser, simulated(), expects=("Content Security Policy", "TrustedHTML")) as page:
        expect(page.get_by_role("link", name="resnet")).to_be_visible()
        refused = page.evaluate(
            """() => {
              try { document.body.innerHTML = "<img src=x onerror='window.hit = 1'>"; } catch { return "refused"; }
              return "accepted";
            }"""
        )
        assert refused == "refused"
        assert page.evaluate("window.hit") is None


def test_charts_do_not_mix_generations(browser: Browser, simulated: Any) -> None:
    """Steps of 0.1 s, then a restart whose ranks repeat steps; the script numbers its steps."""
    measured = """async () => {
      const { intervals } = await import("./js/figures.js");
      const point = (at, generation, steps, forward, redo) => {
        const sums = Array(17).fill(0);
        Object.assign(sums, { 2: forward, 10: 60 + at - forward - redo, 14: redo });
        return [at, generation, 1, steps, ...sums];
      };
      const points = [point(0, 1, 100, 10, 0), point(5, 1, 150, 15, 0), point(10, 2, 0, 15, 0),
        point(15, 2, 120, 15, 2), point(20, 2, 170, 17, 5), point(25, 2, 220, 22, 5)];
      return intervals(points).map((each) => each.step_s && Math.round(each.step_s * 1000));
    }"""
    with opened(browser, simulated()) as page:
        assert page.evaluate(measured) == [100, None, None, 100, 100]


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.nightly)])
def test_it_can_be_used_with_a_screen_reader_and_a_keyboard(
    browser: Browser, simulated: Any, theme: str, tmp_path: Path
) -> None:
    """axe-core finds nothing serious. Each size has its screenshots."""
    url = simulated()
    with opened(browser, url, theme=theme) as page:
        expect(page.get_by_role("link", name="resnet")).to_be_visible()
        expect(page.get_by_role("row", name="eval-nightly")).to_contain_text("replica at rdzv-1.rdzv:29400")
        assert not severe_problems(page)
        for job in JOBS:
            page.goto(f"{url.partition('#')[0]}#/job/{job.job}")
            page.locator(".ranks tbody tr").first.click()
            press(page, "Last step")
            expect(page.get_by_role("img", name="ms hidden")).to_be_visible()
            throughput = page.locator(".chart", has=page.get_by_role("heading", name="Throughput"))
            expect(throughput.locator(".now")).to_contain_text("/s")
            expect(page.get_by_role("img", name="Communication: Exposed")).to_have_accessible_name(HIDDEN_TOO)
            expect(page.get_by_role("img", name="loss: 0.15")).to_be_visible()
            node = page.get_by_label("Node", exact=True)
            expect(node.get_by_role("img", name="GPU use: Mean 9")).to_be_visible()
            expect(node.get_by_role("img", name="Network: Received 3.00 GiB")).to_be_visible()
            page.get_by_label("Search the output").fill("LOSS 2.")
            page.keyboard.press("Enter")
            expect(page.get_by_text("lines have “LOSS 2.”")).to_be_visible()
            page.evaluate("scrollTo(0, 0)")
            keep(page, f"{job.ranks}-{theme}", tmp_path)
            assert not severe_problems(page)
        press(page, "Why did it fail last?")
        expect(page.get_by_role("dialog")).to_contain_text("The restart took")
        keep(page, f"story-{theme}", tmp_path)
        assert not severe_problems(page)
        page.keyboard.press("Escape")
        press(page, "Restart")
        assert not severe_problems(page)
        page.keyboard.press("Escape")
        press(page, "Log out")
        expect(page.get_by_label("Token")).to_be_visible()
        assert not severe_problems(page)


@pytest.mark.nightly(instead=("::test_from_the_start_of_a_job_to_its_end", "wings/web/test_page_feeds.py"))
def test_1024_ranks_do_not_block_the_page(browser: Browser, simulated: Any) -> None:
    """No task uses so much that it blocks the page, while ranks change once a second and a person uses the page.

    Less than a loop of ten million turns, some 40 ms: a slower machine takes longer for both. The trace has what a task
    used, without the time for which it waited for a processor.
    """
    with opened(browser, simulated()) as page:
        with main_thread_of(browser, page) as loops:
            for _ in range(5):
                page.evaluate(LOOP)
        with main_thread_of(browser, page) as tasks:
            use_the_page(page)
    assert len(tasks) > 100
    assert tasks[0].cpu_ms < loops[2].cpu_ms, (loops[:5], tasks[:5])


def use_the_page(page: Page) -> None:
    page.get_by_role("link", name="llama-7b").click()
    expect(page.locator(".ranks tbody tr")).to_have_count(16)
    for scale in ("lag", "time", "communication", "phase", "memory", "health"):
        page.get_by_label("Color of the ranks").select_option(scale)
        page.locator("canvas.map").hover(position={"x": 200, "y": 60})
        page.get_by_role("button", name="Own time").click()
        page.wait_for_timeout(1100)  # ranks change once a second
