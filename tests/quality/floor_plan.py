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
            "device_symptoms",
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
        *(
            "health",
            "health.page",
        ),
        *("health.flight_recorder", "health.nccl_env"),
        *(
            "supervised",
            "health.budget_text",
            "health.budgets",
            "health.inquiry",
            "health.stack_text",
            "health.stillness",
        ),
        "health_options",
        *("preflight.checkup", "preflight.gpu_checkup", "preflight.link_plan", "preflight.table"),
        *("health.exposition", "health.option_text", "health.paces", "health.vitals"),
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
            "rank_view",
            "ranks",
            "recollection",
            "resume",
            "snapshot",
        ),
        "stragglers",
        *("diagnosis", "examination", "hang_words", "sight", "waits"),
        *("sealing", "state", "stopping", "types", "versions", "view"),
    },
    "ddp": {
        *("commits", "place", "sample_order"),  # elastic, init
        "backends",
        *("errors", "plan", "ready", "timeline", "tune"),  # the reducer
        *("findings", "shards"),
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
        *(
            "preflight",
            "preflight.agents",
            "preflight.aside",
            "preflight.doctor",
            "preflight.gpus",
            "preflight.host",
            "preflight.look",
            "preflight.meeting",
            "preflight.trial",
            "preflight.versions",
            "preflight.wire",
        ),
        *("health.communication", "health.dumps", "health.guards"),
        *("health.pages", "health.stacks", "health.watch"),
        *("announcer", "health.gpus", "health.node_watch", "health.sampler"),
    },
    "rendezvous": {
        *("__init__", "client", "codec", "embedded", "hosted", "owner", "store", "torchrun"),
        *(
            "agents",
            "asking",
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
            "notify",
            "operations",
            "probe",
            "reflection",
            "remote",
            "scratchpad",
            "server",
            "settings",
            "submit",
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
        *("ending", "numerics", "page_writer", "sections", "status_page", "torch_marks"),
        *("collective_facts", "collective_marks"),
        *("comm_error", "comm_words", "guard", "peers"),
        *("module", "reducer", "sending", "strays", "tracing", "transport", "tuning", "unchanged", "unused"),
        "watch",
    },
}

# Packages that have a core and a shell of their own: each of their modules is entered, as "health.page".
CORE_AND_SHELL = {"launcher.health", "launcher.preflight"}

# Which modules of another package a package may import.
ABROAD = {
    ("launcher", "core"): {
        f"rendezvous.{name}" for name in ("types", "events", "rank_view", "sight", "stragglers")
    },
    ("launcher", "shell"): {
        f"rendezvous.{name}"
        for name in (
            "client",
            "codec",
            "types",
            "events",
            "rank_view",
            "sight",
            "embedded",
            "hosted",
            "asking",
            "versions",
            "web",
        )
    },
}

# Third-party packages, by the package whose shell may import them. A core imports none.
THIRD_PARTY = {
    "launcher": {"pynvml"},
    "rendezvous": {"grpc", "google"},
    "ddp": {"torch", "mpi4py"},
}
# They run inside the zygote, which is there to import torch; and as a program of its own.
MAY_IMPORT_TORCH = {"launcher.template.warm", "launcher.template.store", "launcher.preflight.trial"}
# A plug-in that torch's own agent loads, and nobody else.
APART = "rendezvous.torchrun"
# Loaded by path in the zygote, under another name; the agent uses the rest of launcher.template as well.
ZYGOTE_ONLY = {
    f"launcher.template.{name}"
    for name in ("warm", "plain", "loop", "rank", "store", "hook", "executed", "tracing", "threshold")
}

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
        "struct",
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
