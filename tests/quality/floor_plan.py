"""The floor plan of docs/architecture.md, as data for the tests. A new module is entered here and there."""

from __future__ import annotations

# Pure: values in, values out. Everything else of a package is shell.
CORE = {
    "launcher": {
        *(
            "affinity",
            "arguments",
            "assemble",
            "config",
            "crash_text",
            "host_names",
            "hosts",
            "join",
            "lines",
            "meeting",
            "options",
        ),
        *(
            "exchange",
            "option",
            "progress",
            "spec",
            "story",
            "supervision",
            "symptoms",
            "usage",
            "values",
            "verdict",
            "version",
            "worker_env",
        ),
    },
    "rendezvous": {
        *(
            "admissible",
            "admission",
            "conversation",
            "events",
            "fitting",
            "frozen_map",
            "growing",
            "journal",
            "machine",
            "orders",
            "policy",
            "ranks",
            "recollection",
            "resume",
            "snapshot",
        ),
        *("sealing", "state", "stopping", "types", "view"),
    },
    "ddp": {
        *("commits", "place", "sample_order"),  # elastic, init
        "backends",
        *("errors", "plan", "ready", "timeline", "tune"),  # the reducer
        "shards",
    },
}
SHELL = {
    "launcher": {
        *(
            "__init__",
            "__main__",
            "agent",
            "binding",
            "checkpoint",
            "checks",
            "cli",
            "config_file",
            "devices",
            "ending",
        ),
        *(
            "isolation",
            "facts",
            "fleet",
            "log_file",
            "log_folder",
            "logs",
            "meet",
            "reach",
            "start",
            "status",
            "terminal",
            "tether",
            "topology",
            "worker",
        ),
        *("zygote", "template"),
    },
    "rendezvous": {
        *("__init__", "client", "codec", "embedded", "hosted", "owner", "store", "torchrun"),
        *(
            "agents",
            "attendance",
            "auth",
            "calls",
            "channel",
            "ctl",
            "ctl_calls",
            "ctl_text",
            "grpc_io",
            "health",
            "job",
            "jobs",
            "limits",
            "log_lines",
            "lull",
            "main",
            "metrics",
            "operations",
            "reflection",
            "remote",
            "scratchpad",
            "server",
            "settings",
            "tokens",
            "web",
        ),
    },
    "ddp": {
        "__init__",
        *("elastic", "mpi", "process_group"),
        *("averaging", "comm_hooks", "sharded_buckets", "sharded_optimizer", "single", "whole_state"),
        *(
            "core_loading",
            "mpi_group",
            "operands",
            "ring",
            "segment",
            "shared_group",
            "shm",
            "work",
        ),  # backends
        *("agreement", "backward", "bucket", "engine", "grad_bucket", "interface", "lasting", "logging_data"),
        *("module", "reducer", "sending", "strays", "tracing", "transport", "tuning", "unchanged", "unused"),
        "watch",
    },
}

# Which modules of another package a package may import.
ABROAD = {
    ("launcher", "core"): {"rendezvous.types", "rendezvous.events"},
    ("launcher", "shell"): {
        f"rendezvous.{name}" for name in ("client", "codec", "types", "events", "embedded", "hosted")
    },
}

# Third-party packages, by the package whose shell may import them. A core imports none.
THIRD_PARTY = {
    "launcher": set(),
    "rendezvous": {"grpc", "google"},
    "ddp": {"torch", "mpi4py"},
}
# They run inside the zygote, which is there to import torch.
MAY_IMPORT_TORCH = {"launcher.template.warm", "launcher.template.store"}
# A plug-in that torch's own agent loads, and nobody else.
APART = "rendezvous.torchrun"
# Loaded by path in the zygote, under another name; the agent uses the rest of launcher.template as well.
ZYGOTE_ONLY = {f"launcher.template.{name}" for name in ("warm", "plain", "loop", "rank", "store", "hook")}

# What a core may import of the standard library: nothing that knows a clock, chance, or the world.
PURE_STDLIB = {
    *("__future__", "binascii", "bisect", "collections", "dataclasses", "difflib", "enum", "functools"),
    *(
        "heapq",
        "ipaddress",
        "itertools",
        "json",
        "math",
        "operator",
        "re",
        "shlex",
        "statistics",
        "string",
        "textwrap",
        "types",
    ),
    *("typing", "unicodedata", "zlib", "signal"),
}
# Of `signal`, a core may know the numbers and names, and set nothing.
PURE_SIGNAL = {"Signals", "valid_signals", "strsignal"}
IMPURE_CALLS = {"open", "print", "input", "eval", "exec", "compile", "breakpoint", "__import__", "id", "hash"}
# Values on their way: built and read by one function, never kept.
MUTABLE_IN_CORE = {"launcher.assemble.Assembly", "launcher.arguments.CommandLine"}

# Everything else is said by the log pump or in one write: lines of several processes must stay whole.
MAY_PRINT = {"launcher.cli"}

MAX_FILE_LINES = 400
MAX_TEST_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
P90_FUNCTION_LINES = 25
BANNED_WORDS = {"manager", "handler", "helper", "helpers", "utils", "util"}
# What torch itself calls so.
TORCHS_WORDS = {"torchrun_handler", "RendezvousHandler", "_ddp_init_helper"}
BANNED_MODULES = BANNED_WORDS | {"common", "misc"}
