"""The options about health, a part of the table in launcher/settings/options.py."""

from __future__ import annotations

from launcher.settings import values
from launcher.settings.health_values import health_address, stragglers
from launcher.settings.option import Option, Reach
from launcher.settings.option import ours as _ours
from launcher.settings.option import switch as _switch

HEALTH = (
    _ours(
        "--preflight",
        "off|quick|full",
        "quick",
        values.choice("off", "quick", "full"),
        "look at this machine before it joins; full lets CPU and GPUs work for a moment and measures the links "
        "between all machines; one that fails is left out (`ddp-launch doctor` shows all of it)",
    ),
    _ours(
        "--preflight-paths",
        "DIR[,...]",
        None,
        values.paths,
        "folders that checkpoints go to, looked at as that of the logs is",
    ),
    _switch("--json", "with `ddp-launch doctor`: what was found as JSON", reach=Reach.FLAG),
)

WATCHING = (
    _ours(
        "--stragglers",
        "off|report|exclude[,...]",
        "report",
        stragglers,
        "name ranks that are slower than their peers, and in what; exclude: their machine sits out at the next restart "
        "if enough are left; then factor=1.5 (slower than the median by that) and window=20s (three of them running)",
    ),
    Option(
        "--health-port",
        "answer /livez, /readyz and /metrics over HTTP; on this machine only, unless an address is given",
        health_address,
        "[ADDRESS:]PORT",
        foreign=("DDP_HEALTH_PORT", str),
    ),
)
