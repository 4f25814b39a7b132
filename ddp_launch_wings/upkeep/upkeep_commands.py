"""`ddp-rendezvous doctor|backup|restore|compact`. `--help` imports this module, so it imports the rest late."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class UpkeepCommand:
    """`file`: the help of its argument; empty: it has none."""

    name: str
    HELP: str
    file: str = ""

    def add(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--store",
            default=os.environ.get("DDP_RENDEZVOUS_STORE", ""),
            metavar="URL",
            help="the store of the service: file:PATH or etcd://HOST:PORT,.../PREFIX [DDP_RENDEZVOUS_STORE]",
        )
        if self.file:
            parser.add_argument("file", help=self.file)

    def carry_out(self, arguments: argparse.Namespace) -> int:
        from ddp_launch_wings.upkeep import store_work

        words, code = store_work.carry_out(self.name, arguments.store, getattr(arguments, "file", ""))
        (sys.stderr if code else sys.stdout).write(f"{words}\n")
        return code


class Doctor:
    HELP = "check the store, certificates, keys, the clock, limits and disks of a service; has the options of serve"

    @staticmethod
    def add(parser: argparse.ArgumentParser) -> None:
        from rendezvous.service import settings

        settings.add_arguments(parser)

    @staticmethod
    def carry_out(arguments: argparse.Namespace) -> int:
        from ddp_launch_wings.upkeep import service_doctor

        return service_doctor.carry_out(arguments)


DOCTOR = Doctor()
BACKUP = UpkeepCommand(
    "backup", "write all jobs and values of a store to a file, while the service runs", "a new file"
)
RESTORE = UpkeepCommand(
    "restore", "fill an empty store from a backup, while no service runs", "a file that `backup` has written"
)
COMPACT = UpkeepCommand(
    "compact", "free the space of a store that old states have used, while the service runs"
)
