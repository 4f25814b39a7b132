"""`ddp.toml`: one description of a job for every place where it may run. Pure; `job_rules` checks the values.

name = "train"
image = "registry.example/train:7"       # Kubernetes only
script = ["train.py", "--epochs", "3"]   # or after `--` on the command line
workdir = "/work"                        # "": that of the image (Kubernetes), or the current directory
nodes = "4"                              # or "2:4", elastic
ranks_per_node = "auto"
spares = 0
max_restarts = 5                         # or "5/1h": at most 5 restarts within any hour
options = ["--log-dir", "/logs"]         # more options of ddp-launch
rendezvous = "HOST:PORT"                 # a deployed service; without it the first node runs the rendezvous

[resources]  cpu, memory, gpus, gpu_resource, shm, extra
[env]        NAME = "value"              # do not put secrets here: see secret_env, and DDP_RENDEZVOUS_TOKEN_FILE
[[volumes]]  path, read_only, and one of: claim, config_map, secret, host_path, size (an empty folder)
[kubernetes] kind (job, jobset, trainjob), context, namespace, rendezvous, queue, priority_class, scheduler,
             service_account, token_secret, tls_secret, secret_env, grace_s, replace, wait, deadline_s, keep_s, labels,
             annotations, node_selector, tolerations, apart, together, runtime_class, user, fenced,
             host_network, capabilities, image_pull_secrets
[slurm]      partition, account, qos, time, reservation, constraint, exclude, gres, array, requeue, signal_s, setup,
             options
[ssh]        hosts, options

`job` explains each key, for example `apart`, `together` and `fenced`.
"""

from __future__ import annotations

import difflib
from dataclasses import MISSING, fields
from math import isfinite
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from rendezvous.submit.job import JobFile, Kubernetes, Resources, Slurm, Ssh, Volume
from rendezvous.submit.job_rules import first_problem
from rendezvous.values.error_codes import Code, Coded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class BadJobFile(Coded, ValueError):
    """The job file is invalid. The message says where, and what to write instead."""

    code = Code.JOB_FILE_INVALID


_SECTIONS = {"resources": Resources, "kubernetes": Kubernetes, "slurm": Slurm, "ssh": Ssh}


def read(data: Mapping[str, Any], script: Sequence[str] = ()) -> JobFile:
    """Read a job. `script` from the command line replaces that of the file. Raises `BadJobFile`."""
    given = dict(data)
    if script:
        given["script"] = list(script)
    for name, kind in _SECTIONS.items():
        if name in given:
            given[name] = _table(kind, given[name], f"[{name}]")
    volumes = given.get("volumes", [])
    if not isinstance(volumes, list):
        raise BadJobFile("invalid volumes: expected a list of tables; write [[volumes]]")
    given["volumes"] = tuple(_table(Volume, each, f"[[volumes]] {i}") for i, each in enumerate(volumes, 1))
    job: JobFile = _table(JobFile, given, "the job file")
    if words := first_problem(job):
        raise BadJobFile(words)
    return job


def _table(kind: type, found: Any, where: str) -> Any:
    if not isinstance(found, dict):
        raise BadJobFile(
            f"{where}: expected a table; write {where if where.startswith('[') else 'KEY = VALUE lines'}"
        )
    known = {each.name: each for each in fields(kind)}
    hints = get_type_hints(kind)
    for key, value in found.items():
        if key not in known:
            raise BadJobFile(f"{where}: unknown key {key!r}{_meant(key, known)}")
        found = found | {key: _value(hints[key], value, f"{where}: {key}")}
    missing = [name for name, each in known.items() if _needed(each) and name not in found]
    if missing:
        raise BadJobFile(f"{where}: missing: {', '.join(missing)}")
    return kind(**found)


def _meant(key: str, known: Mapping[str, Any]) -> str:
    places = [name for name, kind in _SECTIONS.items() if key in {each.name for each in fields(kind)}]
    if places:
        return f"; it belongs below [{'] or ['.join(places)}]"
    close = difflib.get_close_matches(key, known, 1)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known keys: {', '.join(known)}"


def _needed(each: Any) -> bool:
    return each.default is MISSING and each.default_factory is MISSING


def _value(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin in (tuple, list) and isinstance(value, list | tuple):
        return origin(_value(arguments[0], each, where) for each in value)
    if origin is dict and isinstance(value, dict):
        return {key: _value(arguments[1], each, f"{where}.{key}") for key, each in value.items()}
    if hint is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)  # cpu = 4
    if hint is Any:
        return _passed_through(value, where)
    if isinstance(value, origin) and not (origin is int and isinstance(value, bool)):
        return value
    shown = {str: "a string", int: "a whole number", bool: "true or false", list: "a list", tuple: "a list"}
    raise BadJobFile(f"{where} = {value!r}: expected {shown.get(origin, 'a table')}")


def _passed_through(value: Any, where: str) -> Any:
    """A value that is passed to Kubernetes without a check. Dates of TOML have no equivalent there."""
    if isinstance(value, list):
        return [_passed_through(each, where) for each in value]
    if isinstance(value, dict):
        return {key: _passed_through(each, f"{where}.{key}") for key, each in value.items()}
    if not isinstance(value, str | int | float) or not isfinite(value if isinstance(value, float) else 0.0):
        raise BadJobFile(f"{where} = {value}: dates and times are not supported; write it in quotes")
    return value
