"""Options of pre-flight checks and monitoring, a part of the table in launcher/settings/options.py."""

from __future__ import annotations

from launcher.settings import values
from launcher.settings.health_values import (
    health_address,
    health_ignored,
    health_sources,
    http_url,
    stragglers,
)
from launcher.settings.option import Option, Reach
from launcher.settings.option import ours as _ours
from launcher.settings.option import switch as _switch
from launcher.settings.stop_conditions import stop_conditions

PREFLIGHT = (
    _ours(
        "--preflight",
        "off|report|quick|full",
        "report",
        values.choice("off", "report", "quick", "full"),
        "check this node before it joins. report: print what is wrong; ranks start all the same. quick: a node that "
        "fails does not run ranks. full: also run a short load test on CPU and GPUs, and measure the network between "
        "all nodes. `ddp-launch doctor` shows all results",
    ),
    _ours(
        "--preflight-paths",
        "DIR[,...]",
        None,
        values.paths,
        "directories for checkpoints, checked like the log directory; without --preflight, this implies "
        "--preflight quick",
    ),
    _ours(
        "--health-source",
        "SOURCE[,...]",
        None,
        health_sources,
        "ask SOURCE about this node before it joins, and every 30 s while ranks run; a node that it calls unfit does "
        "not join. kubernetes: conditions, taints and labels of the pod's node (node-problem-detector, NVSentinel); an "
        "http:// or https:// URL: metrics of a DCGM exporter, or JSON; a path: a file with either, or with the report "
        "of dcgmi health -c -j. A source that fails never stops a job",
    ),
    _ours(
        "--health-ignore",
        "NAME[,...]",
        None,
        health_ignored,
        "conditions, taints, labels or metrics that --health-source leaves out",
    ),
    _switch("--json", "with `ddp-launch doctor`: print the results as JSON", reach=Reach.FLAG),
)

MONITORING = (
    _ours(
        "--stragglers",
        "off|report|exclude[,...]",
        "report",
        stragglers,
        "report ranks that are slower than the others, and their slow phase. exclude: also leave their node out at the "
        "next restart if enough nodes remain. A rank is a straggler if it takes 1.5 times the median time in three "
        "consecutive windows of 20 s; add factor=NUMBER or window=TIME to change these defaults",
    ),
    _ours(
        "--stop-when",
        "CONDITION[;...]",
        None,
        stop_conditions,
        "end the job, without a restart, when a condition is true. NAME is nan: a rank prints that NAME, for example "
        "loss, is not a number, or passes it to ddp.status; output matches REGEX: a line of a rank's output does; "
        "throughput < PERCENT% for TIME: the ranks take fewer steps in TIME than this share of those in their best "
        "time of this length",
    ),
    _ours(
        "--on-event",
        "COMMAND",
        None,
        values.text,
        "run this shell command when the job starts, restarts or ends, and when a node or a rank is in trouble. It "
        "gets the event as JSON on standard input",
    ),
    _ours(
        "--otlp-endpoint",
        "URL",
        None,
        http_url,
        "export traces of restarts and of the job to this OTLP endpoint, over HTTP, for example http://collector:4318 "
        "(default: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT)",
    ),
    _switch(
        "--web",
        "serve a page that shows and controls this job in a browser, on a free port of 127.0.0.1; the command prints "
        "its URL with a token for one login. It needs the extra `web`: pip install 'ddp-launch[web]'",
    ),
    Option(
        "--health-port",
        "serve /livez, /readyz and /metrics over HTTP; PORT alone listens on 127.0.0.1 only",
        health_address,
        "[ADDRESS:]PORT",
        foreign=("DDP_HEALTH_PORT", str),
    ),
)
