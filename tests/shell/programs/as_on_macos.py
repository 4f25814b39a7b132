"""Runs one of our commands where the names that only Linux has are gone: as_on_macos.py MODULE [WORDS ...]

The standard library and gRPC are loaded before, because theirs is another platform's code there.
"""

import asyncio
import importlib
import multiprocessing
import os
import pkgutil
import resource
import runpy
import select
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request

import grpc.aio
from google.protobuf import json_format

LOADED = (asyncio, grpc.aio, json_format, multiprocessing, runpy, ssl, subprocess, urllib.request)
GONE = {
    os: "memfd_create MFD_CLOEXEC pidfd_open sched_getaffinity sched_setaffinity eventfd splice posix_fallocate "
    "O_TMPFILE O_PATH setns unshare copy_file_range getrandom fdatasync pipe2 P_PIDFD",
    signal: "pidfd_send_signal SIGRTMIN SIGRTMAX SIGSTKFLT SIGPWR",
    socket: "AF_NETLINK AF_VSOCK AF_PACKET SOCK_NONBLOCK SOCK_CLOEXEC SO_PEERCRED SO_BINDTODEVICE TCP_USER_TIMEOUT",
    select: "epoll",
    resource: "prlimit",
    time: "CLOCK_BOOTTIME",
}


def main() -> None:
    for module, names in GONE.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    sys.platform = "darwin"
    _, name, *sys.argv[1:] = sys.argv
    sys.argv[0] = name
    if name == "all":
        for package in sys.argv[1:]:
            import_all(package)
    else:
        runpy.run_module(name, run_name="__main__", alter_sys=True)


def import_all(package: str) -> None:
    found = importlib.import_module(package)
    for each in pkgutil.walk_packages(found.__path__, f"{package}."):
        importlib.import_module(each.name)
        print(each.name)


if __name__ == "__main__":
    main()
