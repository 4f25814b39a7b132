"""`ddp-launch rehearse [options] train.py [args ...]`: runs the script undisturbed, and with one fault each.

A run is a real job of `ddp-launch` with the options of the user. It works in a folder of its own, which has copies of
what the current folder contains, so that no run writes to the user's files. Its ranks record their steps
(`recorder.py`), and play what a rank can do to itself. What is done from outside waits until a rank has reached the
step: the rank writes a file and waits for the answer.

The agents of several nodes all run on this machine, with a service that runs beside them. For faults of the network,
each has a network of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ddp_launch_wings.rehearse import faults, rehearsal_report
from ddp_launch_wings.rehearse.comparison import compared_files, track
from ddp_launch_wings.rehearse.rehearsal_report import Compared, Rehearsal, Run, compare
from launcher.settings.arguments import UsageError, read_arguments
from launcher.settings.values import printable
from launcher.template.contracts import REHEARSAL
from rendezvous.values.durations import seconds_in
from rendezvous.values.error_codes import Code
from rendezvous.values.late_dataclass import dataclass

_LOOK_S, _STOP_S, _CUT_S, _START_S = 0.01, 40.0, 20.0, 30.0
_SHOWN_LINES, _MOST_TEXT = 15, 1 << 20
_MOST_COPIED, _MOST_ENTRIES = 256 << 20, 5_000  # for each run, of the current folder
_NODE = "REHEARSED_NODE"  # in all processes of one node of a run
_HANG = "15s"  # of runs with a process that is stopped, unless the user has set it
_IN_SMALL_DISK = """\
mount -t tmpfs -o size="$1" tmpfs "$2" && cp -a "$3/." "$2" && cd "$2" || exit 1
left=$3; shift 3
"$@"
code=$?
rm -f ballast
cp -a . "$left"
exit $code
"""


class CannotRehearse(UsageError):
    exit_code = 1
    code = Code.CANNOT_REHEARSE


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user has asked for."""

    options: tuple[str, ...]  # of ddp-launch
    words: tuple[str, ...]  # the script, as the ranks are to be told, and its arguments
    script: str
    nodes: int
    play: tuple[str, ...]
    seed: int
    step: int | None
    compare: tuple[str, ...]  # relative to the current folder
    out: str
    limit_s: float
    sets_hang_timeout: bool
    restarts: bool
    environ: Mapping[str, str]


def rehearse(asked: Asked, tell: Callable[[str], None]) -> Rehearsal:
    signal.signal(signal.SIGTERM, _interrupt)  # like Ctrl-C: no job is left behind
    tell("runs the script undisturbed, twice")
    first = _Stage(asked, "undisturbed-1", None).run(tell)
    _check(first)
    again = _Stage(asked, "undisturbed-2", None).run()
    unstable, is_stable = _stable(first, again)
    first, again = (_without(each, is_stable) for each in (first, again))
    ranks, steps = len(first.tracks), min(len(each.steps) for each in first.tracks)
    played: list[Compared] = []
    skipped = []
    for play in faults.plan(asked.play, asked.seed, steps, ranks, asked.nodes, asked.step):
        if why := faults.missing(play.kind, asked.nodes, os.geteuid() == 0, _has_tools()):
            skipped.append((play.kind.name, why))
            continue
        tell(f"{play.kind.name}: {play.words}")
        run = _Stage(asked, play.kind.name, play, _bytes_of(first)).run()
        if not any(name.startswith("played-") for name in os.listdir(f"{run.folder}/record")):
            skipped.append(
                (play.kind.name, f"rank {play.rank} did not reach step {play.step} ({run.folder})")
            )
            continue
        played.append(compare(first, _without(run, is_stable)))
    return Rehearsal(
        asked.script, asked.seed, first, compare(first, again), tuple(played), tuple(skipped), tuple(unstable)
    )


def _interrupt(_signum: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _check(run: Run) -> None:
    if run.exit_code is None:
        raise CannotRehearse(
            "the undisturbed run did not end within --limit. Let the script make fewer steps."
        )
    if run.exit_code:
        tail = _tail(f"{run.folder}/output")
        raise CannotRehearse(f"the undisturbed run failed ({run.said}). The end of its output:\n{tail}")
    if not run.tracks or min(len(each.steps) for each in run.tracks) < 3:
        problem = next((each.problem for each in run.tracks if each.problem), "")
        raise CannotRehearse(
            "the ranks made fewer than 3 steps with an optimizer of torch, so there is nothing to disturb"
            f"{f' ({problem})' if problem else ''}. Let the script make some steps more."
        )


def _stable(first: Run, again: Run) -> tuple[set[str], Callable[[str], bool]]:
    """The files that differ between undisturbed runs, and which paths may be compared.

    Where the names in a folder differ, as with names that contain the time, only those that both runs have.
    """
    unstable = {each.path for each in compared_files(first.files, again.files)}
    one, other = ({part for path in run.files for part in _parts(path)} for run in (first, again))
    wild = {os.path.dirname(part) for part in one ^ other}

    def is_stable(path: str) -> bool:
        known = (part in one & other or os.path.dirname(part) not in wild for part in _parts(path))
        return path not in unstable and all(known)

    return unstable, is_stable


def _parts(path: str) -> Iterator[str]:
    """The path, and the folders that it is in."""
    while path:
        yield path
        path = os.path.dirname(path)


def _without(run: Run, is_stable: Callable[[str], bool]) -> Run:
    return replace(run, files={path: content for path, content in run.files.items() if is_stable(path)})


def _bytes_of(run: Run) -> int:
    paths = (f"{folder}/{name}" for folder, _, names in os.walk(f"{run.folder}/work") for name in names)
    return sum(os.lstat(path).st_size for path in paths if not os.path.islink(path))


def _has_tools() -> bool:
    return all(shutil.which(tool) for tool in ("unshare", "mount", "ip"))


def _tail(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return "".join(file.readlines()[-_SHOWN_LINES:]).rstrip()


# --- one run ---------------------------------------------------------------------------------------


class _Stage:
    def __init__(self, asked: Asked, name: str, play: faults.Play | None, size: int = 0) -> None:
        self._asked, self._play, self._size = asked, play, size
        self._folder = os.path.join(asked.out, name)
        self._work, self._record = os.path.join(self._folder, "work"), os.path.join(self._folder, "record")
        self._agents: list[subprocess.Popen[bytes]] = []
        self._networks: _Networks | None = None
        self._service: subprocess.Popen[bytes] | None = None
        self._frozen: subprocess.Popen[bytes] | None = None

    def run(self, tell: Callable[[str], None] | None = None) -> Run:
        os.makedirs(self._record)
        left_out = {os.path.join(os.getcwd(), path) for path in self._asked.compare}
        self._mirror = mirror = _Mirror()
        mirror.make(os.getcwd(), self._work, left_out | {self._asked.out})
        if tell is not None and (linked := mirror.linked):
            more = f" and {len(linked) - 3} more" if len(linked) > 3 else ""
            tell(f"too large to copy, so the script works on your own: {', '.join(linked[:3])}{more}")
        plan: dict[str, Any] = {}
        if self._play is not None:
            play = self._play
            plan = {"kind": play.kind.act, "rank": play.rank, "step": play.step, "moment": play.moment}
        with open(f"{self._record}/plan.json", "w", encoding="utf-8") as file:
            json.dump(plan, file)
        began = time.monotonic()
        with open(f"{self._folder}/output", "ab") as self._output:
            try:
                code = self._play_job(began)
            finally:
                self._end()
        return self._found(code, time.monotonic() - began)

    def _play_job(self, began: float) -> int | None:
        if self._asked.nodes > 1:
            place = "127.0.0.1"
            if self._play is not None and self._play.kind.name == "network":
                self._networks = _Networks(self._asked.nodes)
                place = self._networks.service
            self._start_service(place)
        for node in range(self._asked.nodes):
            self._start_agent(node)
        gate, acted = f"{self._record}/at-step", False
        while any(agent.poll() is None for agent in self._agents):
            if time.monotonic() - began > self._asked.limit_s:
                return None
            if not acted and os.path.exists(gate):
                acted = True
                self._act(gate)
            time.sleep(_LOOK_S)
        codes = [agent.returncode for agent in self._agents if agent.returncode != -signal.SIGKILL]
        return next((code for code in codes if code), 0)

    def _start_service(self, address: str) -> None:
        with socket.socket() as free:
            free.bind((address, 0))
            port = free.getsockname()[1]
        self._place = f"{address}:{port}"
        command = [sys.executable, "-m", "rendezvous.main", "serve", "--insecure", "--listen", self._place]
        self._service = self._started(command, -1)
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and self._service.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection((address, port), 1.0):
                return
            time.sleep(_LOOK_S)
        raise CannotRehearse(f"the service of the rehearsal did not start: see {self._folder}/output.")

    def _start_agent(self, node: int) -> None:
        asked, events = self._asked, shlex.quote(f"{self._record}/events")
        command = [sys.executable, "-m", "launcher", *asked.options]
        if asked.nodes > 1:
            command += ["--rendezvous", self._place, "--insecure", "--rdzv-id", "rehearsal"]
        if (
            self._play is not None
            and self._play.kind.name in ("freeze", "freeze-node")
            and not asked.sets_hang_timeout
        ):
            command += ["--hang-timeout", _HANG]
        command += ["--log-dir", f"{self._folder}/logs", "--on-event", f"(cat; echo) >> {events}"]
        command += [word.replace("{run}", self._work) for word in asked.words]
        if self._networks is not None:
            at = command.index("launcher") + 1
            command = [*self._networks.enter(node), *command[:at], "--interface", "eth0", *command[at:]]
        if self._play is not None and self._play.kind.needs == "disk":
            left = f"{self._folder}/left"
            if not os.path.exists(left):
                os.rename(self._work, left)
                os.mkdir(self._work)
            size = str(2 * self._size + (64 << 20))
            command = ["unshare", "-m", "sh", "-c", _IN_SMALL_DISK, "sh", size, self._work, left, *command]
        self._agents.append(self._started(command, node))

    def _started(self, command: Sequence[str], node: int) -> subprocess.Popen[bytes]:
        env = {**self._asked.environ, "DDP_LAUNCH_HISTORY_DIR": "none", REHEARSAL: self._record}
        return subprocess.Popen(
            command,
            env=env | {_NODE: f"{self._record} {node}"},
            cwd=self._work,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    # --- what is done from outside ---------------------------------------------------------------------

    def _act(self, gate: str) -> None:
        assert self._play is not None
        with open(gate, encoding="utf-8") as file:
            pid = int(file.read() or 0)
        node = int(_mark_of(pid).rpartition(" ")[2] or 0)
        match self._play.kind.name:
            case "sigterm":
                for agent in self._agents:
                    agent.send_signal(signal.SIGTERM)
                self._let_go()
                for agent in self._agents:
                    agent.wait()
                self._agents = []
                for each in range(self._asked.nodes):
                    self._start_agent(each)
            case "node" | "freeze-node" as name:
                self._signal_node(node, signal.SIGKILL if name == "node" else signal.SIGSTOP)
                if name == "freeze-node":
                    self._frozen = self._agents.pop(node)
                self._start_agent(node)
            case "network":
                assert self._networks is not None
                self._networks.cut(node)
                self._let_go()
                time.sleep(_CUT_S)
                self._networks.mend(node)
        self._let_go()

    def _let_go(self) -> None:
        with open(f"{self._record}/go", "w", encoding="utf-8"):
            pass

    def _signal_node(self, node: int, signum: int) -> None:
        """As a machine that loses its power: twice, because a process may be starting another one."""
        for _ in range(2):
            for pid in _pids_of(f"{self._record} {node}"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)

    def _end(self) -> None:
        """Whatever has not ended: the service, a job over its limit, frozen processes."""
        for agent in self._agents:
            if agent.poll() is None:
                agent.terminate()
        deadline = time.monotonic() + _STOP_S
        for agent in self._agents:
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(max(0.0, deadline - time.monotonic()))
        for node in (*range(self._asked.nodes), -1):
            self._signal_node(node, signal.SIGKILL)
        for process in (*self._agents, self._service, self._frozen):
            if process is not None:
                process.wait()
        if self._networks is not None:
            self._networks.close()

    # --- what is found ---------------------------------------------------------------------------------

    def _found(self, code: int | None, seconds: float) -> Run:
        left = f"{self._folder}/left"
        if os.path.exists(left):  # what the small disk contained
            os.rmdir(self._work)
            os.rename(left, self._work)
        tracks = _tracks(self._record)
        parts, said = _story(f"{self._record}/events")
        if not said and code:
            said = _tail(f"{self._folder}/output").rpartition("\n")[2][-300:]
        if code and not self._asked.restarts:
            said += ". It may restart with --max-restarts N"
        shared = {
            path: line
            for each in tracks
            for path, line, _appends in each.wrote
            if not path.startswith((self._folder, self._asked.out)) and os.path.isfile(path)
        }
        handed_on = {os.path.relpath(path, self._work) for each in tracks for path in each.begun_from}
        written = _written(self._work, self._mirror.copied)
        files = {path: content for path, content in written if not {*_parts(path)} & handed_on}
        return Run(self._play, code, seconds, parts, said, tracks, files, tuple(shared.items()), self._folder)


class _Mirror:
    """Copies what is in a folder, so that a script which writes there does not write to the user's files.

    Linked are sources, which a script only reads, and what is large, hidden or too much. `linked` has the large ones,
    `copied` the size and time of each copy.
    """

    def __init__(self) -> None:
        self.linked: list[str] = []
        self.copied: dict[str, tuple[int, int]] = {}
        self._bytes, self._entries = _MOST_COPIED, _MOST_ENTRIES

    def make(self, source: str, target: str, left_out: set[str]) -> None:
        os.makedirs(target)
        for entry in sorted(os.scandir(source), key=lambda entry: entry.name):
            at = os.path.join(target, entry.name)
            if entry.path in left_out:
                continue
            is_link = entry.is_symlink() or entry.name.endswith(".py")
            is_within = any(path.startswith(f"{entry.path}/") for path in left_out)
            is_copied = self._entries > 0 and not entry.name.startswith(".")
            if entry.is_dir(follow_symlinks=False) and (is_within or is_copied):
                self.make(entry.path, at, left_out)
            elif not is_link and entry.is_file() and self._has_room(entry.stat().st_size):
                shutil.copy2(entry.path, at)
                self.copied[at] = _stamp(at)
            else:
                os.symlink(entry.path, at)
                if not is_link and not entry.name.startswith("."):
                    self.linked.append(entry.path)

    def _has_room(self, size: int) -> bool:
        self._entries -= 1
        if size > self._bytes or self._entries < 0:
            return False
        self._bytes -= size
        return True


def _mark_of(pid: int) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        for each in file.read().split(b"\0"):
            if each.startswith(f"{_NODE}=".encode()):
                return os.fsdecode(each.partition(b"=")[2])
    return ""


def _pids_of(mark: str) -> list[int]:
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return [pid for pid in pids if pid != os.getpid() and _mark_of(pid) == mark]


def _tracks(record: str) -> tuple[Any, ...]:
    by_rank: dict[int, list[str]] = {}
    for name in sorted(os.listdir(record), key=lambda name: name.split("-")[2:3]):
        if name.startswith("rank-"):
            by_rank.setdefault(int(name.split("-")[1]), []).append(os.path.join(record, name))
    return tuple(track(map(_lines, by_rank[rank])) for rank in sorted(by_rank))


def _lines(path: str) -> Iterator[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        for line in file:
            with contextlib.suppress(ValueError):  # the last one of a process that was killed
                yield json.loads(line)


def _story(path: str) -> tuple[dict[str, float], str]:
    """The seconds of all restarts by part, and how the job has ended."""
    parts: dict[str, float] = {}
    said = ""
    for event in _lines(path) if os.path.exists(path) else ():
        if event["event"] == "restarted":
            for name, seconds in event["seconds"].items():
                parts[name] = parts.get(name, 0.0) + seconds
        elif event["event"] in ("ended", "left"):
            said = event["text"]
    return parts, said


def _written(work: str, copied: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, str | bytes]]:
    """What the run has made or changed, by relative path. Hidden files and compiled sources belong to tools."""
    for folder, inner, names in os.walk(work):
        inner[:] = [name for name in inner if not name.startswith((".", "__pycache__"))]
        for path in (os.path.join(folder, name) for name in names if not name.startswith(".")):
            if os.path.isfile(path) and not os.path.islink(path) and copied.get(path) != _stamp(path):
                yield os.path.relpath(path, work), _content(path)


def _stamp(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns


def _content(path: str) -> str | bytes:
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size <= _MOST_TEXT:
            data = file.read()
            with contextlib.suppress(UnicodeDecodeError):
                if b"\0" not in data:
                    return data.decode()
            return hashlib.sha256(data).digest()
        return hashlib.file_digest(file, "sha256").digest()


# --- networks of nodes -----------------------------------------------------------------------------


class _Networks:
    """A network for each node, which a bridge joins. Only root may make them."""

    def __init__(self, nodes: int) -> None:
        self._mark, self._nodes = f"d{os.getpid() % 100_000}", nodes
        number = os.getpid() % 250
        self.service = f"10.213.{number}.254"
        self._ip("link", "add", f"{self._mark}b", "type", "bridge")
        try:
            self._ip("addr", "add", f"{self.service}/24", "dev", f"{self._mark}b")
            self._ip("link", "set", f"{self._mark}b", "up")
            for node in range(nodes):
                self._add(node, f"10.213.{number}.{node + 1}/24")
        except BaseException:
            self.close()
            raise

    def _add(self, node: int, address: str) -> None:
        space, link = f"{self._mark}n{node}", f"{self._mark}v{node}"
        self._ip("netns", "add", space)
        self._ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
        self._ip("link", "set", link, "master", f"{self._mark}b", "up")
        for words in (
            ("addr", "add", address, "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            self._ip("-n", space, *words)

    def enter(self, node: int) -> list[str]:
        named = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', f"node{node}")
        return ["ip", "netns", "exec", f"{self._mark}n{node}", *named]

    def cut(self, node: int) -> None:
        self._ip("link", "set", f"{self._mark}v{node}", "down")

    def mend(self, node: int) -> None:
        self._ip("link", "set", f"{self._mark}v{node}", "up")

    def _ip(self, *words: str) -> None:
        done = subprocess.run(("ip", *words), capture_output=True, text=True)
        if done.returncode:
            raise CannotRehearse(
                f"cannot make a network for each node: ip {' '.join(words)}: {printable(done.stderr)}"
            )

    def close(self) -> None:
        for node in range(self._nodes):
            subprocess.run(("ip", "netns", "del", f"{self._mark}n{node}"), capture_output=True)
            subprocess.run(("ip", "link", "del", f"{self._mark}v{node}"), capture_output=True)
        subprocess.run(("ip", "link", "del", f"{self._mark}b"), capture_output=True)


# --- the command line ------------------------------------------------------------------------------

_HELP = f"""\
usage: ddp-launch rehearse [options] [options of ddp-launch] script.py [args ...]

Runs the script undisturbed, twice, and then once with each fault. Compares
steps, logged values, files and final weights, and says what was lost, what
differed first, and why. Give the script few steps.

  --play FAULT[,...]   what to play (default: {",".join(faults.USUAL)}); all: everything
  --seed N             chooses ranks, steps and moments (default: 0)
  --at-step N          play each fault in this step
  --compare PATH[,...] files and folders of the current folder that the script
                       writes: each run begins without them. What the script
                       makes anew or changes is compared in any case
  --out DIR            a new folder for the report (default: rehearsal-TIME)
  --limit TIME         for one run (default: 10m)
  --json               print values for programs

Faults: {", ".join(faults.KINDS)}

In the arguments of the script, {{run}} stands for the folder of the run. With
--nnodes N, the agents of N nodes run on this machine. The exit code is 1 if a
run differs or fails. The page `ddp-launch docs rehearse` explains the report.
"""
_VALUES = {"--play", "--seed", "--at-step", "--compare", "--out", "--limit"}
_SWITCHES = {"--json"}
_OURS = ("--on-event", "--log-dir", "--rendezvous")  # of ddp-launch, which the rehearsal sets


class _Report(str):
    """The text to print, with the exit code of the command."""

    __slots__ = ("exit_code",)
    exit_code: int


def run(words: list[str], environ: Mapping[str, str], tell: Callable[[str], None]) -> str:
    if any(word in ("--help", "-h") for word in _before_script(words)):
        return _HELP
    given, options, script = _split(words)
    asked = _asked(given, options, script, environ)
    os.makedirs(asked.out)
    found = rehearse(asked, tell)
    values = json.dumps(rehearsal_report.values(found), indent=1)
    for name, content in (("report.json", values), ("report.html", rehearsal_report.page(found))):
        with open(os.path.join(asked.out, name), "w", encoding="utf-8") as file:
            file.write(content + "\n")
    said = (
        values if "--json" in given else f"{rehearsal_report.text(found)}\n\nreport: {asked.out}/report.html"
    )
    made = _Report(said)
    made.exit_code = 0 if found.is_same else 1
    return made


def _before_script(words: list[str]) -> list[str]:
    end = next((at for at, word in enumerate(words) if not word.startswith("-")), len(words))
    return words[:end]


def _split(words: list[str]) -> tuple[dict[str, str], list[str], list[str]]:
    """Our options, those of ddp-launch, and the script with its arguments."""
    given: dict[str, str] = {}
    options: list[str] = []
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-", "--"):
        name, equals, value = words[at].partition("=")
        if name in _SWITCHES or name in _VALUES:
            if name in _VALUES and not equals:
                at += 1
                if at == len(words):
                    raise UsageError(
                        f"missing value for {name}. Use ddp-launch rehearse --help.", code=Code.MISSING_VALUE
                    )
                value = words[at]
            given[name] = value
            at += 1
            continue
        taken = _taken(words, at)
        options += words[at : at + taken]
        at += taken
    rest = words[at + (words[at : at + 1] == ["--"]) :]
    if not rest:
        raise UsageError(
            "ddp-launch rehearse needs a script. Use ddp-launch rehearse --help.", code=Code.MISSING_SCRIPT
        )
    return given, options, rest


def _taken(words: list[str], at: int) -> int:
    """How many words an option of ddp-launch takes."""
    try:
        read_arguments([words[at]])
    except UsageError as error:
        if error.code is not Code.MISSING_VALUE:
            raise
        return 2
    return 1


def _asked(given: dict[str, str], options: list[str], script: list[str], environ: Mapping[str, str]) -> Asked:
    line = read_arguments(options)
    spelled = {typed.spelling for typed in line.options.values()}
    if taken := sorted(spelled & set(_OURS)):
        raise UsageError(
            f"a rehearsal sets {taken[0]} itself. Leave the option out.", code=Code.CONTRADICTING_OPTIONS
        )
    is_script = not line.wants("module") and not line.wants("no_python")
    words = [os.path.abspath(script[0]), *script[1:]] if is_script else script
    if is_script and not os.path.exists(words[0]):
        raise UsageError(f"the script {printable(script[0])} does not exist.", code=Code.MISSING_SCRIPT)
    limit = seconds_in(given.get("--limit", "10m"))
    if not limit:
        raise UsageError(f"invalid --limit {printable(given['--limit'])}: use a duration, for example 10m.")
    out = os.path.abspath(given.get("--out") or f"rehearsal-{time.strftime('%m%d-%H%M%S')}")
    if os.path.exists(out):
        raise UsageError(f"--out {printable(out)} exists. Name a new folder.")
    nodes = line.options["nnodes"].text if line.wants("nnodes") else "1"
    return Asked(
        tuple(options),
        tuple(words),
        script[0],
        int(nodes.rpartition(":")[2]),
        _play(given.get("--play", ",".join(faults.USUAL))),
        _number(given, "--seed", 0),
        _number(given, "--at-step", 1) if "--at-step" in given else None,
        _paths(given.get("--compare", "")),
        out,
        limit,
        line.wants("hang_timeout"),
        line.wants("max_restarts"),
        environ,
    )


def _number(given: dict[str, str], name: str, least: int) -> int:
    text = given.get(name, "0")
    if not text.isdecimal() or int(text) < least:
        raise UsageError(f"invalid {name} {printable(text)}: use a number from {least}.")
    return int(text)


def _play(text: str) -> tuple[str, ...]:
    names = tuple(faults.KINDS) if text == "all" else tuple(filter(None, text.split(",")))
    if unknown := [name for name in names if name not in faults.KINDS]:
        raise UsageError(
            f"unknown fault {printable(unknown[0])} in --play. Use {', '.join(faults.KINDS)}, or all."
        )
    return names


def _paths(text: str) -> tuple[str, ...]:
    found = []
    for path in filter(None, text.split(",")):
        relative = os.path.normpath(path.removeprefix("{run}/"))
        if os.path.isabs(relative) or relative.split("/")[0] in ("..", "."):
            raise UsageError(
                f"--compare {printable(path)} is not below the current folder. Let the script write to {{run}}/NAME, "
                "and use --compare NAME."
            )
        found.append(relative)
    return tuple(found)
