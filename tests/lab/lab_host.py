"""One host of the lab: its own network, name, processes, /dev/shm and cgroup, on the files of this machine.

A host is a process: the first one of a PID namespace. When it is killed, the kernel kills every other process of the
namespace with it, at once and whatever they are doing; after that nothing of the host is left but what it wrote to
disk. That is what "power off" means here. /dev/shm is the host's memory, and is gone then; its TMPDIR lies there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SOON_S = 60.0  # on a busy machine; what is waited for comes within a second
_MAY_STAY = (
    "ddp-launch-",
    "pymp-",
    "torchinductor_",
)  # our logs; what Python and torch leave when they are killed
_CGROUPS = (
    Path("/sys/fs/cgroup/unified") if os.path.isdir("/sys/fs/cgroup/unified") else Path("/sys/fs/cgroup")
)

# $1 its name, $2 its /etc/hosts, $3 where cgroups of version 2 are mounted, if they are
_BOOT = """
set -e
hostname "$1"
mount --bind "$2" /etc/hosts
[ ! -e /etc/resolv.conf ] || mount --bind /dev/null /etc/resolv.conf
mount -t tmpfs tmpfs /dev/shm
mkdir -m 700 /dev/shm/tmp
[ -z "$3" ] || { umount "$3"; mount -t cgroup2 cgroup2 "$3"; }  # of which its own is then the root
echo up
sleep infinity &
wait
"""


def eventually(
    condition: Callable[[], Any], timeout_s: float = SOON_S, what: str = "", look_every_s: float = 0.01
) -> Any:
    """The first true value of `condition`."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what or condition}")
        time.sleep(look_every_s)
    return value


class Process:
    """A command on a host. It ends as the command does: with its exit code, or minus the signal."""

    def __init__(self, entering: subprocess.Popen[bytes]) -> None:
        self._entering = entering  # nsenter: waits for the command, its only child

    @property
    def pid(self) -> int:
        """As this machine sees it."""

        def child() -> str:
            with contextlib.suppress(OSError):
                me = self._entering.pid
                return Path(f"/proc/{me}/task/{me}/children").read_text()
            return ""

        return int(eventually(child, what="the command was started").split()[0])

    def poll(self) -> int | None:
        return self._entering.poll()

    def send(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def wait(self, timeout_s: float = SOON_S) -> int:
        return self._entering.wait(timeout_s)


class Host:
    """Use `Lab`, which gives it its place in the network. A host that was powered off can be booted again."""

    def __init__(self, name: str, hosts_file: Path, mark: str) -> None:
        self.name = name
        self.addresses: tuple[str, ...] = ()
        self._hosts_file, self._mark = hosts_file, mark
        self._cgroup = _CGROUPS / f"lab-{mark}-{name}"
        self._has_cgroups = (_CGROUPS / "cgroup.procs").exists() and os.access(_CGROUPS, os.W_OK)
        self._boot: subprocess.Popen[bytes] | None = None
        self._first = 0
        self._started: list[Process] = []

    def __repr__(self) -> str:
        return self.name

    @property
    def is_on(self) -> bool:
        return self._boot is not None

    @property
    def first(self) -> int:
        """The process that the host consists of, as this machine sees it."""
        return self._first

    @property
    def address(self) -> str:
        return self.addresses[0]

    # --- power -------------------------------------------------------------------------------------

    def boot(self) -> None:
        mounted = ""
        if self._has_cgroups:
            self._remove_cgroups()  # of tests that were killed, and whose process had our number
            self._cgroup.mkdir()
            mounted = str(_CGROUPS)
        apart = ("--net", "--uts", "--mount", "--pid", "--cgroup", "--fork", "--kill-child", "--mount-proc")
        boot = ("sh", "-c", _BOOT, "sh", self.name, str(self._hosts_file), mounted)
        # Should the tests themselves be killed, their hosts lose their power as well.
        command = self._within_cgroup("setpriv", "--pdeathsig", "KILL", "unshare", *apart, *boot)
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        self._boot = subprocess.Popen(command, stdout=subprocess.PIPE, **streams)
        assert self._boot.stdout is not None
        assert self._boot.stderr is not None
        if self._boot.stdout.readline() != b"up\n":
            raise AssertionError(f"{self.name} did not boot: {self._boot.stderr.read().decode()}")
        me = self._boot.pid
        self._first = int(Path(f"/proc/{me}/task/{me}/children").read_text())

    def connect(self, device: str, addresses: tuple[str, ...], mtu: int) -> None:
        """The device, which was made outside, becomes its eth0."""
        self.addresses = addresses
        subprocess.run(("ip", "link", "set", device, "netns", str(self._first)), check=True)
        orders = ["link set lo up", f"link set {device} name eth0 mtu {mtu}"]
        orders += [f"address add {a}/{'64 dev eth0 nodad' if ':' in a else '24 dev eth0'}" for a in addresses]
        batch = "\n".join([*orders, "link set eth0 up"]).encode()
        command = ("nsenter", "-t", str(self._first), "-n", "ip", "-batch", "-")
        subprocess.run(command, input=batch, check=True)

    def kill_everything(self) -> None:
        if self._boot is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._first or self._boot.pid, signal.SIGKILL)
        self._boot.communicate()
        self._boot, self._first = None, 0
        for process in self._started:
            process.wait()
        self._started.clear()
        self._remove_cgroups()

    def _remove_cgroups(self) -> None:
        def removed() -> bool:
            below = sorted(self._cgroup.rglob("cgroup.procs"), reverse=True)
            with contextlib.suppress(OSError):
                for path in below:
                    path.parent.rmdir()
            return not self._cgroup.exists()

        if self._has_cgroups:
            eventually(removed, what=f"the cgroups of {self.name} are empty")

    # --- what runs there ---------------------------------------------------------------------------

    def start(self, *command: str, env: Mapping[str, str] | None = None, **streams: Any) -> Process:
        inside = {"TMPDIR": "/dev/shm/tmp"} | dict(env if env is not None else os.environ)
        enter = ("nsenter", "-t", str(self._first), "-m", "-u", "-n", "-p", "-C", *command)
        streams = {"stdin": subprocess.DEVNULL} | streams
        process = Process(subprocess.Popen(self._within_cgroup(*enter), env=inside, **streams))
        self._started.append(process)
        return process

    def run(self, *command: str, timeout_s: float = SOON_S) -> str:
        """What it printed. Raises when it fails."""
        enter = ("nsenter", "-t", str(self._first), "-m", "-u", "-n", "-p", "-C", *command)
        done = subprocess.run(enter, capture_output=True, text=True, timeout=timeout_s)
        assert done.returncode == 0, f"{self.name}: {command}: {done.stderr}{done.stdout}"
        return done.stdout

    def _within_cgroup(self, *command: str) -> tuple[str, ...]:
        if not self._has_cgroups:
            return command
        join = 'echo 0 >"$0/cgroup.procs"; exec "$@"'
        return ("sh", "-c", join, str(self._cgroup), *command)

    def processes(self) -> dict[int, str]:
        """All that run there, zombies left out, but for those that the host itself consists of."""
        if not self.is_on:
            return {}
        here = _namespace(self._first)
        found: dict[int, str] = {}
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != self._first and _namespace(int(name)) == here:
                with contextlib.suppress(OSError):
                    words = Path(f"/proc/{name}/cmdline").read_text().replace("\0", " ").strip()
                    if words and words != "sleep infinity":
                        found[int(name)] = words[:120]
        return found

    def leftovers(self) -> list[str]:
        """What a job that is over may not leave behind in memory, or as a cgroup. Logs it may."""
        there = Path(f"/proc/{self._first}/root/dev/shm")
        files = [path for path in (*there.iterdir(), *(there / "tmp").iterdir()) if path.name != "tmp"]
        kept = [str(path) for path in files if not path.name.startswith(_MAY_STAY)]
        groups = self._cgroup.iterdir() if self._has_cgroups else ()
        return kept + [path.name for path in groups if path.is_dir()]


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def what_is_missing() -> str:
    """Why no lab can be set up on this machine; "" where it can."""
    if os.geteuid() != 0:
        return "the lab makes network namespaces, which takes root"
    if not os.path.exists("/dev/net/tun"):
        return "the lab needs /dev/net/tun"
    missing = [
        name for name in ("ip", "unshare", "nsenter", "setpriv", "hostname") if shutil.which(name) is None
    ]
    return f"the lab needs {', '.join(missing)}" if missing else ""
