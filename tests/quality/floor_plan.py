"""The floor plan, as data for the tests: which modules are pure, and which rooms may import which others.

A new module is a shell. Enter it in CORE if it is pure, and a new room in ROOMS.
"""

from __future__ import annotations

from dataclasses import dataclass


def within(folder: str, names: str) -> set[str]:
    return {f"{folder}.{name}" for name in names.split()}


# What the house does not import, and the module by which it finds them.
WINGS, DOORS = "ddp_launch_wings", "_ddp_launch_entry"

# Pure: values in, values out. Everything else is shell.
CORE = {
    "launcher": {
        *(
            "answers exchange failure health joining machine notify output progress ranks settings sources "
            "replaying supervision"
        ).split(),
        *within("failure", "crash_text story symptoms verdict "),
        *within(
            "health",
            "exposition flight_recorder node_health page stall_detection time_ledger",
        ),
        *within("joining", "join"),
        *within("machine", "gpu_state xids"),
        *within(
            "output",
            "lines live_area screen",
        ),
        *within("preflight", "checkup"),
        *within("ranks", "affinity worker_env"),
        *within(
            "settings",
            "arguments assemble config options spec usage values",
        ),
    },
    "rendezvous": {
        *"access control diagnosing machine replay rounds service session_replay values".split(),
        *within("client", "session_rules"),
        *within("control", "top_table"),
        *within(
            "diagnosing",
            "diagnosis goodput hang_text stragglers versions waits",
        ),
        *within(
            "rounds",
            "admission hang_examination healing event_log orders policy sealing snapshot stopping view",
        ),
        *within("replay", "records"),
        *within("service", "waiting_jobs"),
        *within(
            "values",
            "cause_text durations error_codes events frozen_map job_state late_dataclass "
            "questions rank_time rank_view rows text_limits types contracts",
        ),
    },
    "ddp": {
        *"groups reducer telemetry".split(),
        *within("launching", "errors"),
        *within("elastic", "commits images"),
        *within("groups", "rank_info"),
        *within("reducer", "plan"),
        *within("telemetry", "coded contracts torch_names"),
    },
    WINGS: {
        "plan",
        *(
            "diagnostics",
            "health_sources",
            "hosts",
            "otlp",
            "redundancy",
            "rehearse",
            "replay",
            "submit",
            "web",
        ),
        *within("rehearse", "comparison faults rehearsal_report"),
        "health_sources.findings",
        "hosts.command_lines",
        "links.link_plan",
        "otlp.traces",
        *within("redundancy", "placement"),
        *within("plan", "prediction step_model table"),
        *within("replay", "player what_if"),
        *within("submit", "job kubernetes slurm ssh"),
        *within("web", "requests"),
    },
}
# Rooms that have a core and a shell: their pure modules are entered one by one, as "health.page".
CORE_AND_SHELL = (
    within(
        "launcher",
        "answers failure health joining machine notify output preflight ranks settings warm_pool",
    )
    | within("rendezvous", "access client control diagnosing replay rounds service values")
    | within("ddp", "elastic groups launching reducer telemetry")
    | within("ddp.elastic", "images")
    | within(
        WINGS,
        "diagnostics health_sources hosts links otlp plan redundancy rehearse replay submit web",
    )
)


@dataclass(frozen=True)
class Needs:
    """What a wing imports of the house, and of other packages."""

    house: frozenset[str] = frozenset()
    packages: frozenset[str] = frozenset()


def needs(house: str, packages: str = "") -> Needs:
    return Needs(frozenset(house.split()), frozenset(packages.split()))


# The rooms outside of the house. Their tests are in the folders of these names in tests/wings.
WINGS_NEED = {
    "plan": needs(
        "launcher.settings.arguments launcher.settings.values launcher.template.contracts rendezvous.values.durations "
        "rendezvous.values.error_codes"
    ),
    "web": needs(
        "rendezvous.access rendezvous.client.credential_files rendezvous.codec rendezvous.control rendezvous.embedded "
        "rendezvous.grpc_io rendezvous.local_calls rendezvous.metrics rendezvous.pb "
        "rendezvous.rounds rendezvous.service rendezvous.values",
        "grpc starlette uvicorn",
    ),
    "redundancy": needs(
        "ddp.elastic.commits ddp.elastic.images ddp.elastic.keeper ddp.elastic.resume ddp.elastic.team "
        "ddp.groups.core_loading ddp.groups.ring ddp.groups.segment ddp.telemetry.coded ddp.telemetry.contracts",
        "torch",
    ),
    "completion": needs(
        "launcher.manual launcher.settings rendezvous.coded_parser rendezvous.values.error_codes"
    ),
    "inspection": needs(
        "ddp.elastic.commits ddp.elastic.files ddp.elastic.images.image ddp.telemetry.coded", "torch"
    ),
    "frameworks": needs(
        "ddp.elastic.files.lease ddp.elastic.generators ddp.last_step ddp.telemetry", "torch"
    ),
    "diagnostics": needs("ddp.reducer ddp.telemetry", "torch"),
    "health_sources": needs("launcher.machine.xids launcher.sources rendezvous.values.late_dataclass"),
    "hosts": needs(
        "launcher.error_boundary launcher.failure.ending launcher.joining.addresses launcher.output launcher.settings "
        "launcher.ssh_control launcher.template.contracts rendezvous.hosted rendezvous.signals rendezvous.values"
    ),
    "links": needs(
        "launcher.joining launcher.preflight.checkup launcher.settings.spec rendezvous.client.remote_session "
        "rendezvous.diagnosing.versions rendezvous.values"
    ),
    "history": needs(
        "launcher.answers launcher.output.log_file rendezvous.rounds rendezvous.service.owner rendezvous.values"
    ),
    "otlp": needs("launcher.exchange rendezvous.values"),
    "etcd": needs("rendezvous.pb rendezvous.store rendezvous.values", "google grpc"),
    "upkeep": needs(
        "rendezvous.access.auth rendezvous.access.secret rendezvous.service rendezvous.store "
        "rendezvous.values.error_codes"
    ),
    "mpi": needs(
        "ddp.groups.core_arguments ddp.groups.process_group ddp.groups.shared_work ddp.telemetry.coded",
        "mpi4py torch",
    ),
    "torchrun": needs("rendezvous.client rendezvous.values", "torch"),
    "departures": needs(
        "rendezvous.control rendezvous.values.contracts rendezvous.values.error_codes rendezvous.values.late_dataclass"
    ),
    "callers": needs("launcher.cli launcher.settings.arguments rendezvous.values.error_codes", "torch"),
    "replay": needs(
        "launcher.replaying rendezvous.control rendezvous.machine rendezvous.replay rendezvous.rounds.admission "
        "rendezvous.values"
    ),
    "compiled": needs("ddp.telemetry", "torch"),
    "rehearse": needs(
        "ddp.telemetry.contracts launcher.settings.arguments launcher.settings.values launcher.template.contracts "
        "rendezvous.values.durations rendezvous.values.error_codes rendezvous.values.late_dataclass",
        "torch",
    ),
    "submit": needs(
        "rendezvous.access.secret rendezvous.control.formats rendezvous.values.contracts "
        "rendezvous.values.error_codes"
    ),
}

# Rooms, and which others of the same package each may import: no two rooms import each other, however indirectly.
ROOMS = {
    "launcher": {
        "template": set(),
        "settings": {"template"},
        "exchange": set(),
        "progress": set(),
        "machine": {"template"},
        "sources": set(),
        "error_boundary": set(),
        "ending_file": {"template"},
        "stop_requests": {"exchange"},
        "joining": {"settings"},
        "output": {"settings", "template"},
        "failure": {"ending_file", "exchange", "machine", "output", "settings", "template"},
        "health": set("error_boundary exchange failure machine output settings sources template".split()),
        "ranks": set("error_boundary exchange failure health machine output settings template".split()),
        "answers": set("error_boundary exchange health machine output ranks settings".split()),
        "preflight": set(
            "error_boundary exchange joining machine output settings sources stop_requests template".split()
        ),
        "supervision": {"exchange"},
        "replaying": {"exchange", "supervision"},
        "ssh_control": {"output"},
        "wiring": set(
            "answers before_restart error_boundary exchange failure health joining notify output preflight progress "
            "ranks replaying settings template".split()
        ),
        "before_restart": set("error_boundary health joining machine preflight settings template".split()),
        "notify": {"error_boundary", "exchange", "settings"},
        "agent": set(
            "error_boundary exchange failure joining settings stop_requests supervision template "
            "wiring".split()
        ),
        "warm_pool": {"machine", "ranks", "settings", "template"},
        "start": set(
            "agent error_boundary ending_file machine ranks settings supervision template warm_pool wiring".split()
        ),
        "manual": {"settings"},
        "cli": {
            "ending_file",
            "machine",
            "manual",
            "preflight",
            "settings",
            "ssh_control",
            "start",
            "warm_pool",
        },
        "__main__": {"cli"},
    },
    "rendezvous": {
        "values": set(),
        "metrics": set(),
        "signals": set(),
        "coded_parser": {"values"},
        "grpc_io": set(),
        "session_replay": {"values"},
        "diagnosing": {"values"},
        "rounds": {"diagnosing", "values"},
        "machine": {"rounds", "diagnosing", "values"},
        "codec": {"rounds", "session_replay", "values"},
        "store": {"rounds", "values"},
        "access": {"metrics", "values"},
        "client": {"access", "codec", "grpc_io", "session_replay", "values"},
        "replay": {"diagnosing", "machine", "rounds", "values"},
        "service": set(
            "access client codec diagnosing machine metrics replay rounds session_replay store values".split()
        ),
        "local": {"embedded"},
        "local_calls": {"access", "embedded", "grpc_io", "metrics", "service"},
        "embedded": {"client", "service", "store", "values"},
        "hosted": {"access", "client", "grpc_io", "replay", "service", "store"},
        "main": set("access coded_parser grpc_io replay service signals store values".split()),
        "control": set(
            "client coded_parser codec diagnosing grpc_io local local_calls replay service values".split()
        ),
    },
    "ddp": {
        "telemetry": set(),
        "launching": {"telemetry"},
        "groups": {"telemetry"},
        "reducer": {"groups", "telemetry"},
        "elastic": {"reducer", "groups", "telemetry"},
        "last_step": {"elastic", "telemetry"},
        "integrations": set(),
        "averaging": {"reducer", "groups", "telemetry"},
        "shm": {"groups"},
    },
    WINGS: {wing: set() for wing in WINGS_NEED},  # a wing imports no other wing
    "ddp.elastic": {
        "commits": set(),
        "request": set(),
        "team": set(),
        "images": {"commits"},
        "files": {"commits", "images"},
        "rejected": {"commits"},
        "resume": {"commits", "files", "images", "rejected", "team"},
        "own": {"images"},
        "contents": {"files", "images", "own"},
        "generators": {"commits", "images", "resume", "sampler", "team"},
        "sampler": {"team"},
        "keeper": {"commits", "contents", "files", "generators", "images", "resume", "team"},
        "survivor": {"commits", "contents", "generators", "keeper", "own", "team"},
        "forgotten": {"own", "sampler"},
        "state": set(
            "commits contents files forgotten generators images keeper own rejected request resume sampler "
            "survivor team".split()
        ),
        "__main__": set(),
    },
}

# Which modules of another package a package may import.
_VALUES = within(
    "values",
    "cause_text durations error_codes events late_dataclass questions rank_time rank_view text_limits types "
    "contracts",
)
ABROAD = {
    ("launcher", "core"): {
        f"rendezvous.{name}" for name in (*_VALUES, "diagnosing.stragglers", "replay.records")
    },
    ("launcher", "shell"): {
        f"rendezvous.{name}"
        for name in (
            *_VALUES,
            *"client codec embedded hosted local signals".split(),
            *(
                "access.client_options",
                "diagnosing.diagnosis",
                "diagnosing.goodput",
                "diagnosing.versions",
                "replay.journal",
                "replay.records",
                "service.owner",
                "service.web",
            ),
        )
    },
}

# Third-party packages, by the package whose shell may import them. A core imports none.
THIRD_PARTY = {
    "launcher": set(),
    "rendezvous": {"grpc", "google"},
    "ddp": {"cloudpickle", "torch", "mpi4py", "fsspec"},
}
# They run inside the zygote, which is there to import torch; and as a program of its own.
# What is NVIDIA's own there: a group of NCCL. Everything else asks torch.accelerator.
MAY_NAME_CUDA = {"ddp.groups.membership"}

MAY_IMPORT_TORCH = {
    "launcher.template.warm",
    "launcher.template.late_variables",
    "launcher.template.store",
    "launcher.template.script_start",
    "launcher.preflight.self_test",
}
# Loaded by path in the zygote, under another name; the agent uses the rest of launcher.template as well.
ZYGOTE_ONLY = {
    f"launcher.template.{name}"
    for name in (
        *("warm", "plain_zygote", "loop", "store", "hook", "script_start"),
        *("learning", "late_variables", "pooled", "freshness", "forking"),
    )
}

# Loads a pure module of ddp by its path, and imports it for types only; so a core may import it.
NAMES_OF_A_CORE = {"launcher.template.contracts"}

# What a core may import of the standard library: nothing that knows a clock, chance, or the world.
PURE_STDLIB = {
    *("__future__", "binascii", "bisect", "codecs", "collections", "dataclasses"),
    *("difflib", "enum", "functools", "hashlib"),
    *(
        "heapq",
        "html",
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
MUTABLE_IN_CORE = {"launcher.settings.assemble.Assembly", "launcher.settings.arguments.CommandLine"}

# Everything else is said by the log pump or in one write: lines of several processes must stay whole.
MAY_PRINT = {"launcher.cli"}

# A module that only one other module imports, of its own folder, is a section of that one, unless it has a reason:
# a pure core below a shell and a module that is imported late have one, the others are listed here with theirs.
MAY_HAVE_ONE_IMPORTER: dict[str, str] = {
    "rendezvous.service.ages": "with its importer it would have more lines than a file may have",
    "rendezvous.service.connections": "with its importer it would have more lines than a file may have",
    "rendezvous.local_calls": "an agent loads it for ddpctl, without the packages of the page",
    "ddp_launch_wings.etcd.store": "a door of its own: the service opens it, and `upkeep` is another door",
    "ddp_launch_wings.etcd.owner": "with its importer it would have more lines than a file may have",
    "ddp_launch_wings.compiled.between_nodes": "a theory of its own: what goes from node to node, tested without ranks",
    "ddp_launch_wings.web.feed": "with its importer it would have more lines than a file may have",
    "ddp_launch_wings.completion.scripts": "ddpctl and ddp-rendezvous load it without the options of ddp-launch",
    "launcher.failure.symptoms": "with its importer it would have more lines than a file may have",
    "launcher.output.rank_display": "with its importer it would have more lines than a file may have",
    "launcher.template.store": "it imports torch, which the loop does not",
    "ddp_launch_wings.departures.notices": "pure but for the parsers of dates, and tested by itself",
    "launcher.cli": "the installed commands enter here, and `python -m launcher` too",
    "launcher.before_restart": "a theory of its own: what a node does between two generations",
    "launcher.health.dumps": "people run it: `python -m launcher.health.dumps`, in docs/communication-errors.md",
    "ddp_launch_wings.redundancy.parity": "the rounds of protection and the arithmetic would be over 900 lines",
    "ddp.elastic.forgotten": "a theory of its own, and the state would be over 900 lines",
    "ddp.elastic.survivor": "a theory of its own: what is left of a step that was interrupted",
    "ddp.reducer.pickled": "pickles of wrappers contain the name of its class",
    "rendezvous.diagnosing.hang_text": "its functions are named after what they describe: words.call(call)",
}

# The house and its wings, without the generated messages. All four may only fall; the goal for the house is 62,000
# lines in 260 files.
MOST_HOUSE_LINES = 67_130
MOST_HOUSE_FILES = 286
MOST_WING_LINES = 17_888
MOST_WING_FILES = 89
# The tests, and of these what is no file of tests. Both may only fall; the goals are 68,000 and 20,000.
MOST_TEST_LINES = 90_356
MOST_TEST_SUPPORT_LINES = 30_520
MOST_SHARED_FILE_NAMES, MOST_SHARED_CLASS_NAMES = 17, 21
MAX_FILE_LINES = 900
MAX_TEST_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
P90_FUNCTION_LINES = 25
BANNED_WORDS = {"manager", "handler", "helper", "helpers", "utils", "util"}
# What torch itself calls so.
TORCHS_WORDS = {"torchrun_handler", "RendezvousHandler", "_ddp_init_helper"}
BANNED_MODULES = BANNED_WORDS | {"common", "misc"}
