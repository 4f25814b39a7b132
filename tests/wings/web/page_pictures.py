"""Draws the pictures of the page for the README, from a real job: `make screenshots`.

    python tests/wings/web/page_pictures.py [docs/img]

Eight ranks train a small model; the data of rank 5 comes slowly. After the launcher has named it, the script shows the
job in Chromium, light and dark. Then it kills rank 2, and shows the story of this failure.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from playwright.sync_api import sync_playwright

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Page

Found = TypeVar("Found")
ROOT = Path(__file__).resolve().parents[3]
RANKS, SLOW, VICTIM = 8, 5, 2
WITHIN_S = 180.0
TRAIN = f"""
import os, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

class Samples(Dataset):
    def __len__(self):
        return 1_000_000
    def __getitem__(self, at):
        time.sleep(0.03 if dist.get_rank() == {SLOW} else 0.005)  # a slow disk
        return torch.randn(64)

class Layer(torch.nn.Linear):
    def forward(self, x):
        time.sleep(0.04)  # it is larger than it looks
        return super().forward(x).relu()

torch.set_num_threads(1)
dist.init_process_group("gloo")
print(f"rank {{dist.get_rank()}} is process {{os.getpid()}}", flush=True)
model = DistributedDataParallel(torch.nn.Sequential(*[Layer(64, 64) for _ in range(4)]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for batch in DataLoader(Samples(), batch_size=8):
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


class Job:
    """What `ddp-launch` prints, as it comes."""

    def __init__(self, folder: Path) -> None:
        (folder / "train.py").write_text(TRAIN)
        self._log = folder / "output"
        words = [
            sys.executable,
            "-m",
            "launcher",
            "--web",
            "--nproc-per-node",
            str(RANKS),
            "--max-restarts",
            "3",
        ]
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(
                [*words, "--rdzv-id", "train", "train.py"],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def says(self, pattern: str, since: int = 0) -> re.Match[str]:
        return until(lambda: re.search(pattern, self.text()[since:]), pattern)

    def text(self) -> str:
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)


def until(look: Callable[[], Found | None], what: str) -> Found:
    end = time.monotonic() + WITHIN_S
    while not (found := look()):
        if time.monotonic() > end:
            sys.exit(f"not seen within {WITHIN_S:g} s: {what}")
        time.sleep(0.1)
    return found


def draw(job: Job, page: Page, folder: Path) -> Iterator[Path]:
    page.goto("".join(job.says(r"for one login: (\S+)").groups()))
    job.says(f"rank {SLOW} on .* is slower than its peers")
    page.get_by_role("button", name=f"Rank {SLOW}: details").click()
    page.locator(".chart .now").filter(has_text="/s").first.wait_for()
    time.sleep(60)  # the charts get some points
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
        page.evaluate("scrollTo(0, 0)")
        yield kept(page, folder / f"page-slow-rank-{theme}.png")
    page.emulate_media(color_scheme="light")
    before = len(job.text())
    os.kill(int(job.says(rf"rank {VICTIM} is process (\d+)")[1]), signal.SIGKILL)
    job.says("is back at step|healed in|restarted in", before)
    time.sleep(10)  # the first steps, with which the story ends
    page.get_by_role("button", name="Why did it fail last?", exact=True).click()
    page.get_by_text("The restart took").wait_for()
    yield kept(page, folder / "page-story-light.png")


def kept(page: Page, path: Path) -> Path:
    page.screenshot(path=path)
    return path


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "img"
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as there, sync_playwright() as playwright:
        unconfined = ["--no-sandbox"] if os.getuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=browser_path, args=unconfined)
        page = browser.new_page(viewport={"width": 1360, "height": 850})
        page.set_default_timeout(WITHIN_S * 1000)
        job = Job(Path(there))
        try:
            for path in draw(job, page, folder):
                print(f"drew {path}", flush=True)
        finally:
            job.stop()
            browser.close()


if __name__ == "__main__":
    main()
