"""All nodes of a job measure the links between them, before they join (`--preflight full`, `ddp-launch doctor`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.joining.connect import ServiceConnection
    from launcher.preflight.checkup import Comparison, Report
    from launcher.settings.spec import LaunchSpec


async def compare(
    connection: ServiceConnection, spec: LaunchSpec, report: Report, mtu: int, say: Callable[[str], None]
) -> Comparison:
    from ddp_launch_wings.links import network_check  # which loads gRPC

    return await network_check.compare(connection, spec, report, mtu, say)
