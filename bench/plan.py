"""How right `ddp-launch plan` is: its constants fitted to all-reduces, its steps compared with runs.

    python bench/plan.py [--fit] [--rates 200mbit 400mbit] [--hosts 2 4 8] [--models 'idle backward' ...]
                         [--json FILE] [--write-docs [FILE]]

Needs root, `ip` and `tc`: hosts are network namespaces of this machine, joined by a switch (bridge). The link of each
host is limited in both directions. `--fit` times all-reduces of one rank per host, and prints the constants of
`ddp_launch_wings/plan/step_model.py` that fit best. Without it, steps are predicted with the constants of that file,
and then run. No run of a step has been used for the fit. All hosts share the processors of this machine, so a profile
is made with as many ranks as the job has.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from hosts import bandwidth, play, switched, why_not
from shown import ROOT, machine, write_between_markers

from ddp_launch_wings.plan import step_model
from ddp_launch_wings.plan.command import record_profile
from ddp_launch_wings.plan.step_model import TRANSPORTS, Cluster, Link, usual_inside

if TYPE_CHECKING:
    from ddp_launch_wings.plan.step_model import Profile

_RANK = os.path.join(ROOT, "bench", "plan_rank.py")
_LINK_RANK = os.path.join(ROOT, "bench", "link_rank.py")
_TARGET = 0.10
_CARRIED = 0.90  # of the links: 0.95 remains for data over TCP
_FIT_SIZES = [4, 1 << 16, 1 << 20, 1 << 22]
_TIMEOUT_S = 600.0


# --- the fit -----------------------------------------------------------------------------------------


def fit(rates: list[str], hosts: list[int]) -> str:
    """Least squares of relative errors: seconds = collective + messages x message + moved / (share x bandwidth)."""
    import torch

    rows: dict[str, list[list[float]]] = {"gloo": [], "hier": []}
    for rate in rates:
        for count in hosts:
            with switched(count, rate) as names:
                trial = {"backends": list(rows), "models": [], "sizes": _FIT_SIZES, "repeats": 9}
                for key, seconds in play(names, 1, [_RANK], trial, _TIMEOUT_S).items():
                    backend, size = key.split("/")
                    moved = 2 * (count - 1) / count * int(size) / bandwidth(rate)
                    rows[backend].append([1.0, 2.0 * (count - 1), moved, seconds])
                    print(
                        f"{key}, {count} hosts, {rate}: {seconds * 1e3:.3f} ms", file=sys.stderr, flush=True
                    )
    lines = []
    for backend, found in rows.items():
        table = torch.tensor(found, dtype=torch.float64)
        weights = 1 / table[:, 3:]
        solved = torch.linalg.lstsq(table[:, :3] * weights, table[:, 3:] * weights, driver="gelsd").solution
        collective, message, slowness = solved.flatten().tolist()
        lines.append(
            f"{backend}: collective_s={collective:.3g}, message_s={message:.3g}, share={1 / slowness:.3g}"
        )
    return "\n".join(lines)


# --- the comparison ----------------------------------------------------------------------------------


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    profiles: dict[tuple[str, int], Profile] = {}
    rows = []
    for hosts in options.hosts:
        for ranks_each in options.ranks_each:
            world = hosts * ranks_each
            for model in options.models:
                if (model, world) not in profiles:
                    words = (_RANK, "--profile", model)
                    profiles[model, world] = record_profile(words, world, 20, _TIMEOUT_S, os.environ)
            for rate in options.rates:
                with switched(hosts, rate) as names:
                    carried = play(names, 1, [_LINK_RANK], {}, _TIMEOUT_S) / bandwidth(rate)
                    trial = {"backends": ["gloo", "hier"], "models": options.models, "sizes": [], "steps": 25}
                    taken = play(names, ranks_each, [_RANK], trial, _TIMEOUT_S)
                for key, seconds in taken.items():
                    backend, model = key.split("/", 1)
                    profile = profiles[model, world]
                    cluster = Cluster(hosts, ranks_each, Link(bandwidth(rate), 0.0), usual_inside("cpu"))
                    step = step_model.ddp(profile, cluster, TRANSPORTS[backend])
                    rows.append(
                        {
                            "backend": backend,
                            "model": model,
                            "hosts": hosts,
                            "ranks_each": ranks_each,
                            "rate": rate,
                            "carried": carried,
                            "measured_s": seconds,
                            "predicted_s": step.seconds,
                            "error": step.seconds / seconds - 1,
                        }
                    )
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def text_of(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| hosts x ranks | link | carried | transport | model | measured | predicted | error |",
        "|---|---|---:|---|---|---:|---:|---:|",
    ]
    lines += [
        f"| {row['hosts']} x {row['ranks_each']} | {row['rate']} | {row['carried']:.0%} | {row['backend']} "
        f"| {row['model']} | {row['measured_s'] * 1e3:.1f} ms | {row['predicted_s'] * 1e3:.1f} ms "
        f"| {row['error']:+.0%} |"
        for row in rows
    ]
    return "\n".join([*lines, "", summary([row for row in rows if row["carried"] >= _CARRIED])])


def summary(rows: list[dict[str, Any]]) -> str:
    """Counted are the hosts whose links this machine can play: the others wait for its processors, not for a link."""
    if not rows:
        return f"This machine carries less than {_CARRIED:.0%} of each of these links, so no error can be stated."
    errors = sorted(abs(row["error"]) for row in rows)
    within = sum(error <= _TARGET for error in errors)
    return (
        f"Carried: the share of a link that plain TCP gets when all hosts send to their neighbors at once. "
        f"Steps within {_TARGET:.0%} where it is at least {_CARRIED:.0%}: {within} of {len(errors)}; median error "
        f"{errors[len(errors) // 2]:.0%}, largest {errors[-1]:.0%}. Target: all: "
        f"{'met' if within == len(errors) else 'not met'}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--fit", action="store_true", help="fit the constants to all-reduces, and run no step"
    )
    parser.add_argument("--rates", nargs="+", default=["200mbit", "400mbit"])
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--ranks-each", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--models", nargs="+", default=["MLP, 1M", "ResNet-50-like"])
    parser.add_argument("--json", metavar="FILE")
    page = os.path.join(ROOT, "docs", "plan.md")
    parser.add_argument("--write-docs", metavar="FILE", nargs="?", const=page)
    options = parser.parse_args()
    if problem := why_not():
        print(f"skipped: {problem}")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    if options.fit:
        print(fit(options.rates, options.hosts))
        return
    machine_line = machine()
    rows = compare(options)
    text = f"{text_of(rows)}\n\nMachine: {machine_line}."
    print(text)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": machine_line, "rows": rows}, file, indent=1)
    if options.write_docs:
        write_between_markers(options.write_docs, "plan", text)


if __name__ == "__main__":
    main()
