"""`make demo`: trains on two ranks, kills one of them half-way, and checks that the job recovers.

The demo starts the job as a user would. Then it only watches: the training script writes its metrics into a pipe, and
half-way through, the demo sends SIGKILL to one rank. It checks every claim that it prints at the end. If a claim is
false, the demo fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
EPOCHS = 12
KILL_AFTER = EPOCHS // 2
RANKS = 2
SILENT_S = 120.0  # the import of torch takes a minute on a busy machine
PR_SET_CHILD_SUBREAPER = 36
BOLD, GREEN, RED, DIM, PLAIN = ("\x1b[1m", "\x1b[32m", "\x1b[31m", "\x1b[2m", "\x1b[0m")


@dataclass
class Watched:
    """What the metrics of the job have shown so far."""

    losses: list[float] = field(default_factory=list)
    pids: list[dict[int, int]] = field(default_factory=list)  # per start of the ranks: rank -> process
    resumed_at: int = 0
    reported_before: int = 0  # epochs reported until then
    victim: int = 0
    killed_at: float = 0.0
    recovery_s: float = 0.0

    def read_line(self, line: str) -> None:
        match json.loads(line):
            case {"what": "started", "rank": rank, "pid": pid}:
                self.note_start(rank, pid)
            case {"what": "resumed", "epoch": epoch}:
                self.note_resumption(epoch)
            case {"what": "epoch", "loss": loss}:
                self.losses.append(loss)
            case {"what": "batch", "epoch": epoch} if epoch > KILL_AFTER and not self.victim:
                self.kill_one()

    def note_start(self, rank: int, pid: int) -> None:
        if not self.pids or rank in self.pids[-1]:
            self.pids.append({})
        self.pids[-1][rank] = pid
        if self.victim and len(self.pids[-1]) == RANKS:
            self.recovery_s = time.monotonic() - self.killed_at

    def note_resumption(self, epoch: int) -> None:
        if not self.resumed_at:  # each rank reports it
            self.resumed_at, self.reported_before = epoch, len(self.losses)

    @property
    def unreported(self) -> int:
        """Epochs in the checkpoint that were never reported: one, if the kill came between the two."""
        return self.resumed_at - self.reported_before

    def kill_one(self) -> None:
        victim = self.pids[-1][1]
        with contextlib.suppress(ProcessLookupError):  # if the demo was delayed until the job was over
            os.kill(victim, signal.SIGKILL)
            self.victim, self.killed_at = victim, time.monotonic()
            say(f"demo: kill -9 {victim}   (this is rank 1)", RED)


def say(text: str, style: str = "", fresh_row: bool = True) -> None:
    """Print in one write. First clear the live line that the job may show at the bottom of the terminal."""
    if sys.stdout.isatty():
        text = ("\r\x1b[K" if fresh_row else "") + style + text + PLAIN
    os.write(1, text.encode() + b"\n")


def command(folder: str) -> list[str]:
    return [
        *("ddp-launch", "--nproc-per-node", str(RANKS), "--max-restarts", "3", "-r", "2"),
        *(os.path.relpath(HERE / "train_digits.py"), "--epochs", str(EPOCHS)),
        *("--checkpoint", f"{folder}/digits.pt", "--metrics", f"{folder}/metrics"),
    ]


def adopt_orphans() -> None:
    """Make processes that outlive the job our children, so that the demo finds them at the end."""
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def watch(job: subprocess.Popen[bytes], metrics: int, seen: Watched) -> None:
    """Read metrics until the job ends. Stop a job that reports nothing for too long."""
    ended = os.pidfd_open(job.pid)
    waiting = select.poll()
    waiting.register(metrics, select.POLLIN)
    waiting.register(ended, select.POLLIN)
    rest = b""
    while True:
        ready = waiting.poll(SILENT_S * 1000)
        if not ready:
            say(f"demo: no metrics for {SILENT_S:g} s; stopping the job", RED)
            job.terminate()
            break
        if ready == [(ended, select.POLLIN)]:
            break
        *lines, rest = (rest + os.read(metrics, 1 << 16)).split(b"\n")
        for line in lines:
            seen.read_line(line.decode())
    os.close(ended)


def orphans() -> int:
    count = 0
    while True:
        try:
            pid, _status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return count
        count += 1
        if pid == 0:  # children exist, and all of them are running
            return count


def verdict(code: int, seen: Watched, left: int) -> list[tuple[bool, str]]:
    """Each claim, and whether it is true."""
    first, last = (seen.losses[0], seen.losses[-1]) if seen.losses else (0.0, 0.0)
    recovered = seen.victim > 0 and [len(group) for group in seen.pids] == [RANKS, RANKS]
    return [
        (recovered, f"rank 1 was killed; {seen.recovery_s:.2f} s later two new ranks were connected"),
        (
            seen.resumed_at >= KILL_AFTER and seen.unreported in (0, 1),
            f"they continued from the checkpoint of epoch {seen.resumed_at}",
        ),
        (
            len(seen.losses) + max(0, seen.unreported) == EPOCHS and last < first / 4,
            f"the loss fell from {first:.2f} to {last:.2f} in {len(seen.losses)} epochs",
        ),
        (code == 0, f"ddp-launch succeeded (exit code {code})"),
        (left == 0, f"no process was left running ({left} found)"),
    ]


def run(folder: str) -> list[tuple[bool, str]]:
    os.mkfifo(f"{folder}/metrics")
    metrics = os.open(f"{folder}/metrics", os.O_RDWR | os.O_NONBLOCK)  # writing too: no end of file
    argv = command(folder)
    parts = [shlex.join(argv[:-7]), shlex.join(argv[-7:-4]), shlex.join(argv[-4:])]
    say("$ " + " \\\n    ".join(parts) + "\n", BOLD, fresh_row=False)
    seen = Watched()
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", "")))
    job = subprocess.Popen(argv, env=os.environ | {"PATH": path})
    try:
        watch(job, metrics, seen)
    except KeyboardInterrupt:  # the terminal has sent SIGINT to the job too
        job.wait()
        raise
    code = job.wait()
    return verdict(code, seen, orphans())


def main() -> int:
    adopt_orphans()
    say("Two ranks learn to read noisy digits. Half-way, one of them is killed.", fresh_row=False)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="demo-") as folder:
        try:
            results = run(folder)
        except KeyboardInterrupt:
            return 130
    say("", fresh_row=False)
    for held, text in results:
        say(f"  {'✓' if held else '✗ false:'} {text}", GREEN if held else RED, fresh_row=False)
    say(f"  {time.monotonic() - started:.1f} s in total", DIM, fresh_row=False)
    return 0 if all(held for held, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main())
