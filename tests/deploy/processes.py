"""An engine for where containers cannot be run: each pod is a host of the network lab, its container a process there.

Commands, arguments, variables, volumes, names, addresses, users and the read-only root are those of the manifests.
The programs are those of this machine, and there are some things that only a container engine does.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import lab_host
from images import ROOT, image, name_of
from lab_network import Lab

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cluster import Mount
    from lab_host import Host, Process
    from pods import Pod

T = TypeVar("T")

_POD_ROOT = Path(__file__).with_name("pod_root.py")
_CLONE_NEWNET = 0x40000000
_PATH = f"{sys.prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SOON_S = 60.0


def what_is_missing() -> str:
    missing = [name for name in ("kubectl", "openssl", "etcd") if shutil.which(name) is None]
    return f"no {', '.join(missing)} on this machine" if missing else lab_host.what_is_missing()


class Processes:
    what = (
        "as processes in the network lab: images, seccomp profiles, limits of resources and network policies "
        "are not honoured"
    )

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lab = Lab(0)
        self._lab.name_by_version(4)
        self._hosts: dict[str, Host] = {}
        self._processes: dict[str, Process] = {}

    def address(self, number: int) -> str:
        return f"10.77.0.{number}"

    def publish(self, hosts: Mapping[str, str]) -> None:
        self._lab.name_also(hosts)

    def start(self, pod: Pod, mounts: Sequence[Mount]) -> None:
        if pod.name in self._hosts:
            self._lab.power_on(self._hosts[pod.name], number=pod.number)
        else:
            self._hosts[pod.name] = self._lab.add(pod.name, pod.number)
        request = self._folder / f"{pod.name}.json"
        request.write_text(json.dumps(self._request(pod, mounts)))
        command = ("unshare", "--mount", sys.executable, str(_POD_ROOT), str(request))
        with self._log(pod).open("ab") as out:
            self._processes[pod.name] = self._hosts[pod.name].start(*command, stdout=out, stderr=out)

    def signal(self, pod: Pod, signum: int) -> None:
        self._processes[pod.name].send(signum)

    def remove(self, pod: Pod) -> None:
        self._lab.power_off(self._hosts[pod.name])

    def logs(self, pod: Pod) -> str:
        return self._log(pod).read_text(errors="replace")

    def exit_code(self, pod: Pod) -> int | None:
        code = self._processes[pod.name].poll()
        return code if code is None or code >= 0 else 128 - code

    def execute(self, pod: Pod, *command: str, env: Mapping[str, str]) -> tuple[int, str]:
        within = ("nsenter", "-t", str(self._processes[pod.name].pid), "-m", "-u", "-n", "-p", "--wd=/")
        words = [*within, *_as_user(pod), *command]
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        variables = {"PATH": _PATH} | dict(env)
        done = subprocess.run(words, env=variables, text=True, timeout=_SOON_S, **streams)
        return done.returncode, done.stdout

    def reach(self, pod: Pod, ask: Callable[[], T]) -> T:
        """A thread may be in another network than the rest of its process."""
        answers: list[T] = []
        network = os.open(f"/proc/{self._hosts[pod.name].first}/ns/net", os.O_RDONLY | os.O_CLOEXEC)

        def there() -> None:
            if ctypes.CDLL(None, use_errno=True).setns(network, _CLONE_NEWNET) == 0:
                answers.append(ask())

        thread = threading.Thread(target=there)
        thread.start()
        thread.join()
        os.close(network)
        assert answers, f"nothing could be asked in the network of {pod.name}"
        return answers[0]

    def close(self) -> None:
        self._lab.close()

    def _log(self, pod: Pod) -> Path:
        return self._folder / f"{pod.name}.log"

    def _request(self, pod: Pod, mounts: Sequence[Mount]) -> dict[str, object]:
        container, root = pod.container, self._folder / "roots" / pod.name
        root.mkdir(parents=True, exist_ok=True)
        found = image(name_of(container["image"]))
        command = tuple(container.get("command", found.entrypoint))
        arguments = container.get("args", () if "command" in container else found.command)
        env = {each["name"]: each["value"] for each in container.get("env", [])}
        return {
            "root": str(root),
            "read_only": container["securityContext"]["readOnlyRootFilesystem"],
            "shown": _shown(command[0]),
            "mounts": [[each.path, each.source and str(each.source), each.read_only] for each in mounts],
            "group": pod.group,
            "words": [*_as_user(pod), *command, *arguments],
            "env": {"PATH": _PATH, "HOSTNAME": pod.name} | env,
            "folder": "/",
        }


def _as_user(pod: Pod) -> list[str]:
    """What the pod's security contexts ask for; all of them ask for the same."""
    security, own = pod.spec["securityContext"], pod.container["securityContext"]
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert own["allowPrivilegeEscalation"] is False
    who = (f"--reuid={pod.user}", f"--regid={security['runAsGroup']}", f"--groups={pod.group}")
    return [shutil.which("setpriv") or "", *who, "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]


def _shown(program: str) -> list[str]:
    """Our own tree, its interpreter, and the program where it is not among the system's."""
    found = Path(shutil.which(program, path=_PATH) or "/usr").resolve().parent
    return sorted({str(ROOT), sys.prefix, os.path.realpath(sys.base_prefix), str(found)})
