"""`ddpctl depart`: watches for the announcement that this node leaves, then takes a checkpoint and drains the node.

It runs beside the agent of the node, as a process of its own: it can neither slow the ranks nor end them. A source that
does not answer is reported once, and asked again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping

from ddp_launch_wings.departures import notices
from ddp_launch_wings.departures.notices import Departure, NotRead, checkpoint_wait_s
from rendezvous.values.contracts import INVALID_USAGE
from rendezvous.values.error_codes import Code, with_code

HELP = "watch for the announcement that this node leaves; then take a checkpoint, and drain the node"
_WITHIN_S, _LARGEST, _NOT_FOUND = 3.0, 1 << 20, 404
_METADATA = "http://169.254.169.254"
_URLS = {
    "ec2": f"{_METADATA}/latest/meta-data/spot/instance-action",
    "gcp": "http://metadata.google.internal/computeMetadata/v1/instance/preempted",
    "azure": f"{_METADATA}/metadata/scheduledevents?api-version=2020-07-01",
}
_HEADERS = {"gcp": {"Metadata-Flavor": "Google"}, "azure": {"Metadata": "true"}}
_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", nargs="?", default="", help="the job id; default: the only running job")
    parser.add_argument(
        "node", nargs="?", default=socket.gethostname(), help="default: the name of this host"
    )
    parser.add_argument(
        "--source",
        required=True,
        metavar="S[,S]",
        help="ec2, gcp, azure, kubernetes, slurm, a URL or a file with our JSON; NAME=URL asks another address",
    )
    parser.add_argument(
        "--every", type=float, default=5.0, metavar="SECONDS", help="between looks (default: 5)"
    )
    parser.add_argument(
        "--lead",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="with slurm: take a checkpoint this long before SLURM_JOB_END_TIME (default: 120)",
    )


def carry_out(arguments: argparse.Namespace) -> int:
    sources = [source for source in arguments.source.split(",") if source]
    if unknown := [each for each in sources if not _is_known(each)]:
        _say(with_code(f"{unknown[0]!r} is not a source. Use a name, a URL or a path", Code.INVALID_VALUE))
        return INVALID_USAGE
    # Loaded before the announcement, not after it: `ctl` itself imports it late.
    import rendezvous.control.ctl_calls  # noqa: F401

    watch = DepartureWatch(sources, arguments.lead, os.environ)
    while (departure := watch.look(time.time())) is None:
        time.sleep(arguments.every)
    return _leave(departure, arguments)


def _is_known(source: str) -> bool:
    return source.partition("=")[0] in notices.READERS or "/" in source


class DepartureWatch:
    def __init__(self, sources: list[str], lead_s: float, environ: Mapping[str, str]) -> None:
        self._sources, self._lead_s, self._environ = sources, lead_s, environ
        self._silent: set[str] = set()

    def look(self, now: float) -> Departure | None:
        """Return the first announcement of all sources."""
        for source in self._sources:
            try:
                found = self._ask(source, now)
            except (OSError, NotRead, subprocess.SubprocessError) as error:
                if source not in self._silent:
                    _say(f"{source} does not say whether this node leaves: {error}")
                self._silent.add(source)
                continue
            self._silent.discard(source)
            if found is not None:
                return found
        return None

    def _ask(self, source: str, now: float) -> Departure | None:
        name, _, url = source.partition("=")
        if name not in notices.READERS:
            text = _get(source, {}) if source.startswith(("http://", "https://")) else _read(source)
            return notices.own(text, now) if text.strip() else None
        if name == "slurm" and not url:
            return self._ask_slurm(now)
        if name == "kubernetes":
            text = self._ask_kubernetes(url)
        else:
            text = _get(url or _URLS[name], _token(url) if name == "ec2" else _HEADERS.get(name, {}))
        return notices.READERS[name](text, now) if text.strip() else None

    def _ask_slurm(self, now: float) -> Departure | None:
        node = self._environ.get("SLURMD_NODENAME") or socket.gethostname()
        end_time = self._environ.get("SLURM_JOB_END_TIME", "")
        over = notices.slurm_end(end_time, self._lead_s, now) if end_time else None
        if over is not None or shutil.which("scontrol") is None:
            return over
        done = subprocess.run(
            ("scontrol", "show", "node", node), capture_output=True, text=True, timeout=_WITHIN_S, check=True
        )
        return notices.slurm(done.stdout, now)

    def _ask_kubernetes(self, url: str) -> str:
        if url:
            return _get(url, {})
        host, port = (self._environ.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))
        name = self._environ.get("NODE_NAME", "")
        if not host or not name:
            raise NotRead("KUBERNETES_SERVICE_HOST and NODE_NAME must be set")
        where = f"https://{f'[{host}]' if ':' in host else host}:{port or '443'}/api/v1/nodes/{name}"
        return _get(
            where, {"Authorization": f"Bearer {_read(f'{_ACCOUNT}/token').strip()}"}, f"{_ACCOUNT}/ca.crt"
        )


def _token(url: str) -> dict[str, str]:
    """The instances of EC2 answer only to those who have asked for a token."""
    base = url.partition("/latest/")[0] or _METADATA
    text = _get(f"{base}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, method="PUT")
    return {"X-aws-ec2-metadata-token": text.strip()} if text else {}


def _get(url: str, headers: Mapping[str, str], authority: str = "", method: str = "GET") -> str:
    """Return "" if there is nothing at this address: clouds have no such page until a node leaves. No proxies."""
    import ssl

    context = ssl.create_default_context(cafile=authority) if authority else None
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    try:
        with opener.open(
            urllib.request.Request(url, None, dict(headers), method=method), timeout=_WITHIN_S
        ) as answer:
            return str(answer.read(_LARGEST).decode(errors="replace"))
    except urllib.error.HTTPError as error:
        if error.code == _NOT_FOUND:
            return ""
        raise


def _read(path: str) -> str:
    """Return "" if there is no such file: whoever announces a departure creates it."""
    try:
        with open(path.removeprefix("file://"), encoding="utf-8", errors="replace") as file:
            return file.read(_LARGEST)
    except FileNotFoundError:
        return ""


# --- leaving -------------------------------------------------------------------------------------------


def _leave(departure: Departure, arguments: argparse.Namespace) -> int:
    """Drain also without a checkpoint: ranks that resume from their last one lose less than those that are killed."""
    left = "" if departure.in_s is None else f" in {departure.in_s:.0f} s"
    what = "the job ends" if departure.is_of_job else f"{arguments.node} leaves"
    _say(f"{what}{left}: {departure.reason}")
    job = [arguments.job] if arguments.job else []
    wait = f"{checkpoint_wait_s(departure):.0f}"
    code = _ctl(arguments, "checkpoint", *job, "--wait", wait, "--reason", departure.reason)
    if departure.is_of_job:
        return code
    return _ctl(arguments, "drain", *_job_and_node(arguments), "--reason", departure.reason)


def _job_and_node(arguments: argparse.Namespace) -> list[str]:
    return [arguments.job, arguments.node] if arguments.job else [arguments.node]


def _ctl(arguments: argparse.Namespace, *words: str) -> int:
    from rendezvous.control import ctl  # it imports this module

    where = ["--rendezvous", arguments.rendezvous] if arguments.rendezvous else []
    return ctl.main([*where, *words])


def _say(text: str) -> None:
    sys.stderr.write(f"ddpctl depart: {text}\n")
    sys.stderr.flush()
