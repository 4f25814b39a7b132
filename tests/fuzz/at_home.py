"""What comes from a file, a page, a command line or a rank's own mouth: to the agent and to people's tools."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import re
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from serve_settings import parse_serve

from ddp.telemetry import contracts
from ddp_launch_wings.submit import command
from launcher.failure import crash_text
from launcher.failure.rank_facts import read_error_record
from launcher.failure.verdict import RankEnd, cause_of, cause_of_asynchronous
from launcher.health import dumps, page, stacks
from launcher.health.exposition import Running
from launcher.health.exposition import text as exposed
from launcher.health.flight_recorder import NotADump, with_recorded
from launcher.health.node_health import HealthState
from launcher.health.page import phase_times
from launcher.health.stall_detection import Watch, look, reports
from launcher.joining.join import MayServe, NoRendezvous, find_rendezvous, parse_endpoint
from launcher.output import lines as output
from launcher.output import live_area
from launcher.output.live_area import StreamView
from launcher.settings import values
from launcher.settings.arguments import UsageError, read_arguments
from launcher.settings.checks import read_config
from launcher.settings.config import ConfigFile, config_path, merge
from launcher.settings.options import BY_SPELLING, OPTIONS
from launcher.settings.spec import Budgets
from launcher.settings.values import BadValue
from rendezvous import codec
from rendezvous.access.secret import SecretUnusable, parse
from rendezvous.service.settings import SettingsUnusable
from rendezvous.values.events import Examined, PhaseTimesReported, RankFailed
from rendezvous.values.rank_view import ProcessView, RankReport
from rendezvous.values.types import AgentId

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random

_AGENT = AgentId("a", "1")
_VALUE = re.compile(rb'(?<=[:\[,] )(?:"[^"]*"|-?[0-9][0-9.e+-]*)|\[[^\[\]]*\]')
_JOBS = Path(__file__).parents[2] / "deploy/jobs"


@contextlib.contextmanager
def a_file(data: bytes) -> Iterator[str]:
    """Its path. It lies in memory."""
    descriptor = os.memfd_create("fuzz")
    try:
        os.write(descriptor, data)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


# --- what ranks leave and say ----------------------------------------------------------------------------


def rank_page(data: bytes) -> None:
    """A rank that has lost its mind writes its page; all that is made of it can still be shown and sent."""
    whole = data.ljust(contracts.SIZE, b"\0")
    seen = page.snapshot(lambda at, size: whole[at : at + size])
    view = page.view(seen, 10**18, 3, ProcessView(state="R"))
    page.in_words(view)
    watch = look(look(Watch(0.0), [view], 1.0, 1.0), [view], 2.0, 1.0)
    told = reports(watch, [view], Budgets())
    sent = codec.from_agent_bytes(Examined(_AGENT, 1, told))
    codec.read_from_agent(sent, _AGENT)
    codec.read_from_agent(codec.from_agent_bytes(PhaseTimesReported(_AGENT, 1, phase_times([view]))), _AGENT)
    exposed(Running(1, 0, 1, ready=True), [view], HealthState()).encode()


def error_file(data: bytes) -> None:
    """And the cause that is made of it can be sent."""
    with a_file(data) as path:
        record = read_error_record(path)
    _told(RankEnd("a", 1, 1, 1, error_record=record))


def last_words(data: bytes) -> None:
    """What a dying rank printed. The first byte is how it died."""
    text = data[1:].decode(errors="replace")
    number = data[0] if data else 0
    died = {"exit_code": None, "signal": number - 128} if number > 128 else {"exit_code": number}
    _told(RankEnd("a", 1, 1, **died, stderr_tail=text))  # type: ignore[arg-type]
    crash_text.bounded(crash_text.clean_lines(text))
    stacks.is_local_work(text)


def _told(end: RankEnd) -> None:
    sent = codec.from_agent_bytes(RankFailed(_AGENT, 1, cause_of(end)))
    codec.read_from_agent(sent, _AGENT)


def output_lines(data: bytes) -> None:
    """In chunks of any size: whole lines come out, and nothing that moves the cursor."""
    view, shown, now, size = StreamView(), b"", 0.0, data[0] + 1 if data else 1
    for at in range(1, len(data), size):
        view, texts = live_area.feed(view, data[at : at + size], now)
        for whole in texts:
            assert not whole or whole.endswith(b"\n")
        shown, now = shown + texts.record, now + 0.3
        view, texts = live_area.update(view, now)
        shown += texts.record
    shown += live_area.finish(view).record
    said = output.presentable(shown)
    said.decode()
    assert not set(said) & {0x07, 0x08, 0x0B, 0x0C, 0x0D}, said


def watchdog_report(data: bytes) -> None:
    """What torch prints of an error of NCCL, of a rank that still runs."""
    end = RankEnd("node", 1, 1, None, stderr_tail=data.decode(errors="replace"))
    for state in (
        "NCCL reports COMM_ERROR in process group 0",
        "Watchdog caught collective operation timeout in 0",
    ):
        cause = cause_of_asynchronous(end, state)
        assert "\n" not in cause.reason
        codec.read_from_agent(codec.from_agent_bytes(RankFailed(_AGENT, 1, cause)), _AGENT)


def flight_recorder(data: bytes) -> None:
    """A rank writes what it likes; the agent tells the service of it."""
    found = [dumps.parsed(data, rank) for rank in (0, 1)]
    assert all(dumps.compared(found))
    told = with_recorded((RankReport(0), RankReport(1)), found, 10**18)
    codec.read_from_agent(codec.from_agent_bytes(Examined(_AGENT, 1, told)), _AGENT)


_ODD = (
    *(
        "Infinity",
        "-Infinity",
        "NaN",
        "1e400",
        "-1",
        "true",
        "null",
        "9" * 400,
        "9" * 5000,
        '"' + "9" * 400 + '"',
    ),
    *(
        "[]",
        "{}",
        "[" * 2000 + "]" * 2000,
        '"' + "[" * 3000 + '"',
        "[[" + "9" * 300 + ",9" * 200 + "]]",
        '"\\ud800"',
    ),
)


def with_an_odd_value(data: bytes, chance: Random) -> bytes:
    """JSON stays JSON, and one of its values becomes one that json.loads takes and arithmetic does not."""
    places = list(_VALUE.finditer(data))
    if not places:
        return data
    place = chance.choice(places)
    return data[: place.start()] + chance.choice(_ODD).encode() + data[place.end() :]


# --- what people write -------------------------------------------------------------------------------------


def job_file(data: bytes) -> None:
    """The whole of `ddpctl submit --dry-run`: a word of what is wrong, or something to submit."""
    with a_file(data) as path:
        for target in ("kubernetes", "slurm", "ssh"):
            with (
                contextlib.redirect_stdout(io.StringIO()) as shown,
                contextlib.redirect_stderr(io.StringIO()),
            ):
                code = command.carry_out(Namespace(target=target, file=path, dry_run=True, script=[]))
            assert (code == 0) == bool(shown.getvalue()), (code, target)


def launch_config(data: bytes) -> None:
    with a_file(data) as path:
        line = read_arguments(["--config", path])
        merge(line, {}, read_config(config_path(line, {})))


def service_config(data: bytes) -> None:
    with a_file(data) as path:
        parse_serve(["--config", path], {})


def job_secret(data: bytes) -> None:
    """The text of DDP_RENDEZVOUS_SECRET."""
    parse(data.decode("utf-8", "surrogateescape"), "DDP_RENDEZVOUS_SECRET")


def command_line(data: bytes) -> None:
    """Words are parted by NUL, as they are in /proc/PID/cmdline."""
    words = data.decode("utf-8", "surrogateescape").split("\0")
    merge(read_arguments(words), {}, ConfigFile())


def option_value(data: bytes) -> None:
    """--OPTION=VALUE"""
    flag, _, value = data.decode("utf-8", "surrogateescape").partition("=")
    if flag in BY_SPELLING:
        BY_SPELLING[flag].parse(value)


def hosts(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    with contextlib.suppress(BadValue):
        values.hosts(text)
    assert values.read_hostfile(text)


def meeting_place(data: bytes) -> None:
    """--rendezvous; and what Slurm and Kubernetes put into the environment."""
    text = data.decode("utf-8", "surrogateescape")
    first, _, second = text.partition("\n")
    for environ in ({"SLURM_JOB_NODELIST": first, "SLURM_JOB_ID": second}, {"JOB_COMPLETION_INDEX": second}):
        with contextlib.suppress(NoRendezvous):
            found = find_rendezvous("", 2, first, environ)
            assert isinstance(found, MayServe)
            assert 0 < found.endpoint.port < 65536
    assert 0 < parse_endpoint(text).port < 65536


# --- seeds -------------------------------------------------------------------------------------------------

_RECORD = {"type": "ValueError", "message": "bad", "traceback": "", "time_ns": 1, "step": 3, "exit_code": 2}
_TORCHS = {"message": {"message": "ValueError: bad", "extraInfo": {"py_callstack": "T", "timestamp": "1"}}}
_TRACEBACK = b"""\x01[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 3, in <module>
[rank1]:     main()
[rank1]: ValueError: bad batch
"""
_ENTRY = {
    "process_group": ["0", "default_pg"],
    "profiling_name": "nccl:all_reduce",
    "collective_seq_id": 1,
    "input_sizes": [[4]],
    "input_dtypes": ["Float"],
    "state": "scheduled",
}
_WATCHDOG = b"""vm:1:41 [0] NCCL WARN NET/IB : mlx5_0:1 Got async event : port error
[rank1]:[E1123 03:58:16.3 ProcessGroupNCCL.cpp:568] [Rank 1] Collective WorkNCCL(SeqNum=1, OpType=ALLREDUCE) raised \
the following async exception: NCCL error: unhandled system error, NCCL version 2.27.5
ncclSystemError: System call failed.
Last error:
NET/IB: Got completion from peer 10.0.0.5<4> with status=12
[rank1]:[E1123 03:58:16.3 ProcessGroupNCCL.cpp:685] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL()
"""
_DUMP = {"entries": [_ENTRY], "pg_config": {"0": {"ranks": "[0, 1]"}}}
_HOSTS = (b"node1,user@node2:4,[::1]:8", b"node1 slots=4\n# nothing\nnode2\n")
_SECRET = b"""-----BEGIN PRIVATE KEY-----
MIGHAgEA
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBdzCC
-----END CERTIFICATE-----
"""
_CONFIG = b'nnodes = "1:2"\nmax-restarts = "5/1h"\nscript = "train.py"\nargs = ["--lr", 0.1]\n'
_SERVE = b'listen = ["127.0.0.1:0"]\nstore = "memory"\nmax-jobs = 3\nreflection = true\n'


def _page() -> bytes:
    whole = bytearray(contracts.SIZE)
    whole[: page.HEADER.fields.size] = page.HEADER.fields.pack(
        contracts.MAGIC, contracts.VERSION, contracts.SIZE, 0, 77, 1, 3, 0
    )
    whole[64:72] = (2).to_bytes(8, "little")
    return bytes(whole)


TARGETS = (
    ("rank_page", rank_page, (), (_page(),), 4096),
    ("error_file", error_file, (), (json.dumps(_RECORD).encode(), json.dumps(_TORCHS).encode())),
    ("last_words", last_words, (), (_TRACEBACK, b"\x8bFatal Python error: Segmentation fault\n")),
    ("output_lines", output_lines, (), (b"\x03a\rb\n\x1b[2Kc\xff\n",)),
    (
        "flight_recorder",
        flight_recorder,
        (NotADump,),
        (json.dumps(_DUMP).encode(), pickle.dumps(_DUMP)),
        8192,
        with_an_odd_value,
    ),
    ("watchdog_report", watchdog_report, (), (_WATCHDOG, _WATCHDOG[_WATCHDOG.index(b"[rank1]") :]), 8192),
    ("job_file", job_file, (), tuple(each.read_bytes() for each in sorted(_JOBS.glob("*.toml"))), 4096),
    ("launch_config", launch_config, (UsageError,), (_CONFIG,)),
    ("service_config", service_config, (SettingsUnusable,), (_SERVE,)),
    ("job_secret", job_secret, (SecretUnusable,), (_SECRET,)),
    ("command_line", command_line, (UsageError,), (b"--nnodes\x001:2\0-t=3\0train.py\0--lr", b"--help")),
    (
        "option_value",
        option_value,
        (BadValue,),
        tuple(f"{each.flag}={each.default or 1}".encode() for each in OPTIONS),
    ),
    ("hosts", hosts, (BadValue,), _HOSTS),
    (
        "meeting_place",
        meeting_place,
        (NoRendezvous,),
        (b"gpu[03-07,12],cpu1\n17", b"job-1.svc\n1", b"[::1]:29"),
    ),
)
