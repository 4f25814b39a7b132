"""`make gpu`: tests, faults and benchmarks on the GPU of this machine, with the torch that is installed there.

    python3 bench/gpu/gpu_command.py [PART ...] [--budget SECONDS] [--results FOLDER] [--libnccl FILE]
                                     [--again] [--rehearse cpu|emu] [--installed] [--list]

Each part is a process of its own with a time limit. After each part its figures are written to FOLDER/gpu.json, and its
output to FOLDER/gpu.log. The next run goes on with the parts that are left. docs/gpu.md says more.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import gpu_floor  # noqa: F401  first: it refuses a Python that cannot read the others
import gpu_machine
import gpu_parts
import gpu_results
from gpu_machine import CannotAsk
from gpu_parts import BY_NAME, PARTS, Part
from gpu_results import Outcome, PartResult, Results

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
_NOT_RUN = 3  # as in gpu_part.py
_MARK = "GPU_RUN"
_SHARE_OF_LIMIT = 0.8  # after which a part that measures in rounds takes no more of them
_LOOK_EVERY_S = 0.05
_SHOWN_LINES = 12


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help="names, or beginnings such as fault-; default: all")
    parser.add_argument(
        "--budget", type=seconds, default=float(gpu_parts.TOTAL_S), help="seconds for this run (default 1500)"
    )
    parser.add_argument("--results", type=Path, default=ROOT / "gpu-results", help="default: gpu-results/")
    parser.add_argument("--libnccl", help="another NCCL for this torch: a libnccl.so.2, or its folder")
    parser.add_argument("--again", action="store_true", help="run the parts even if they are finished")
    parser.add_argument(
        "--rehearse",
        choices=("cpu", "emu"),
        help="without a GPU: small, on CPUs or on the emulated accelerator; the figures mean nothing",
    )
    parser.add_argument(
        "--installed", action="store_true", help="test the installed ddp-launch instead of this checkout"
    )
    parser.add_argument("--list", action="store_true", help="show the parts, and run nothing")
    return parser.parse_args()


def seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):  # also refuses nan
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0. Give for example 570")
    return number


def main() -> int:
    options = arguments()
    try:
        names = gpu_parts.chosen(options.parts)
        if options.list:
            print(plan_text(names))
            return 0
        env, machine = equipped(options)
        if not machine["devices"] and not options.rehearse:
            print(
                f"torch {machine['torch']} sees no GPU here. On a machine with one, `make gpu` would run:\n"
            )
            print(plan_text(names))
            return 0
        results = earlier(options, machine)
        names = gpu_parts.with_what_they_need(names, results.parts)
    except (CannotAsk, gpu_parts.NoSuchPart, gpu_results.WrongResults) as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 2
    print(f"{', '.join(machine['devices']) or 'a rehearsal on CPUs'}; torch {machine['torch']}")
    try:
        Run(options, env, results).through(names)
    except KeyboardInterrupt:
        print(
            f"\ngpu: interrupted. {options.results}/gpu.json has the parts that ended before. "
            "Run the command again to go on",
            file=sys.stderr,
        )
        return 128 + signal.SIGINT
    except OSError as error:
        print(
            f"\ngpu: {error.filename or options.results}: {error.strerror or error}. {options.results}/gpu.json "
            "has the parts that ended before. Repair this, and run the command again to go on",
            file=sys.stderr,
        )
        return 2
    return summary(names, results, options)


def plan_text(names: list[str]) -> str:
    rows = [f"{part.name:<26} {part.usual_s:>5.0f} s {part.limit_s:>5.0f} s  {part.shows}" for part in PARTS]
    rows = [row for row, part in zip(rows, PARTS, strict=True) if part.name in names]
    usual = sum(BY_NAME[name].usual_s for name in names)
    head = f"{'part':<26} {'usual':>7} {'limit':>7}"
    return "\n".join([head, *rows, f"{len(names)} parts, usually {usual / 60:.0f} minutes on one card"])


def equipped(options: argparse.Namespace) -> tuple[dict[str, str], dict[str, Any]]:
    """The environment of all parts, and what the machine has."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("DDP_", "PET_", "GPU_"))}
    env["PYTHONUNBUFFERED"] = "1"
    if not options.installed:
        others = env.get("PYTHONPATH", "")
        env["PYTHONPATH"] = f"{ROOT}{os.pathsep}{others}" if others else str(ROOT)
    library, version = gpu_machine.library_of(options.libnccl) if options.libnccl else (None, "")
    if library is not None and not options.rehearse:
        env = gpu_machine.preloaded(env, library)
    machine = gpu_machine.facts(env)
    if missing := gpu_machine.missing_in_words(machine):
        raise CannotAsk(missing)
    if library is not None and not options.rehearse:
        gpu_machine.check_preloaded(machine, library, version)
    if options.rehearse:
        machine |= {"devices": [], "nccl": ""}
    if machine["devices"] and not options.installed:
        machine["native"] = compile_core() or machine["native"]
    return env, machine


def compile_core() -> bool:
    """The parts in C, into this checkout. Without them Python does the same, and is slower."""
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["unknown"])[-1]
        print(f"gpu: the compiled core could not be built ({reason}); its Python version is used instead")
    return done.returncode == 0


def earlier(options: argparse.Namespace, machine: dict[str, Any]) -> Results:
    try:  # before a part has run whose results would be lost
        options.results.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=options.results).close()
    except OSError as error:
        raise gpu_results.WrongResults(
            f"cannot write results into {options.results}: {error.strerror}. Name another folder with RESULTS="
        ) from None
    path = options.results / "gpu.json"
    results = gpu_results.read(path)
    if results is None:
        return Results(machine, bool(options.rehearse))
    if not gpu_results.same_machine(results, machine) or results.rehearsal != bool(options.rehearse):
        raise gpu_results.WrongResults(
            f"{path} has results of another machine or release: {json.dumps(results.machine)}. "
            "Remove it, or name another folder with RESULTS="
        )
    return results


class Run:
    """One call of `make gpu`."""

    def __init__(self, options: argparse.Namespace, env: dict[str, str], results: Results) -> None:
        self._options, self._env, self._results = options, env, results
        self._deadline = time.monotonic() + options.budget

    def through(self, names: list[str]) -> None:
        names = names if self._options.again else gpu_results.left_in_order(names, self._results)
        for name in names:
            part = BY_NAME[name]
            limit_s = gpu_parts.allowance_s(part, self._deadline - time.monotonic())
            if limit_s is None:
                continue  # a shorter one may still fit
            print(f"{name:<26} ", end="", flush=True)
            result = self._played(part, limit_s)
            result = result.after(self._results.parts.get(name))
            self._results.parts[name] = result
            gpu_results.write(self._options.results / "gpu.json", self._results)
            print(
                f"{result.took_s:>5.0f} s  {result.outcome}{': ' * bool(result.why)}{_last_line(result.why)}"
            )

    def _played(self, part: Part, limit_s: float) -> PartResult:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
            findings = Path(folder, "findings")
            log = Path(folder, "output")
            mark = uuid.uuid4().hex
            command = [sys.executable, str(HERE / part.program), *part.words]
            with log.open("wb") as output:
                process = subprocess.Popen(
                    command,
                    env=self._env | self._told(findings, limit_s) | {_MARK: mark},
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
                try:
                    in_time = _wait(process, limit_s)
                finally:  # also if somebody interrupts this command: a part is in a session of its own
                    end_all(mark)
                    process.kill()  # it has its mark only after exec
                    process.wait()
            took_s = time.monotonic() - began
            text = log.read_text(errors="replace")
            self._keep_log(part, text)
            return outcome(_findings(findings), process.returncode if in_time else None, took_s, text)

    def _told(self, findings: Path, limit_s: float) -> dict[str, str]:
        devices = self._results.machine["devices"]
        return {
            "GPU_FINDINGS": str(findings),
            "GPU_DEVICE": self._options.rehearse or "cuda",
            "GPU_REHEARSAL": str(int(bool(self._options.rehearse))),
            "GPU_SHARING": self._results.sharing(),
            "GPU_CARDS": str(max(1, len(devices))),
            "GPU_SECONDS": f"{limit_s * _SHARE_OF_LIMIT:.0f}",
        }

    def _keep_log(self, part: Part, text: str) -> None:
        with (self._options.results / "gpu.log").open("a") as file:
            file.write(f"=== {part.name}, {time.strftime('%H:%M:%S')}\n{text}\n")


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def end_all(mark: str) -> None:
    """Everything that the part has started, whatever session it is in: the mark is in its environment."""
    wanted = f"{_MARK}={mark}".encode()
    deadline = time.monotonic() + 30
    while (left := _with_mark(wanted)) and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(_LOOK_EVERY_S)


def _with_mark(wanted: bytes) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                found.append(int(name))
        except OSError:
            continue  # it has ended, or is not ours
    return found


def _findings(path: Path) -> list[gpu_results.Finding]:
    """A part reports a row again with each round. The last line may be cut off, where the part was stopped."""
    found: dict[tuple[str, ...], gpu_results.Finding] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            each = json.loads(line)
        except ValueError:
            continue
        found[tuple(str(each.get(key, "")) for key in ("kind", "table", "name", "mode"))] = each
    return list(found.values())


def outcome(findings: list[gpu_results.Finding], code: int | None, took_s: float, text: str) -> PartResult:
    """`code` is None if the part was stopped at its limit."""
    reasons = [each["why"] for each in findings if each["kind"] == "not run"]
    end = "\n".join(text.strip().splitlines()[-_SHOWN_LINES:])
    took_s = round(took_s, 1)
    if code is None:
        return PartResult(Outcome.LATE, took_s, end, findings)
    if code == _NOT_RUN and reasons:
        return PartResult(Outcome.NOT_RUN, took_s, reasons[-1], findings)
    if code != 0:
        return PartResult(Outcome.FAILED, took_s, f"exit code {code}\n{end}", findings)
    wrong = [each["name"] for each in findings if each["kind"] == "check" and not each["ok"]]
    if wrong:
        return PartResult(Outcome.FAILED, took_s, f"failed: {', '.join(wrong)}", findings)
    return PartResult(Outcome.DONE, took_s, "", findings)


def _last_line(why: str) -> str:
    return why.strip().splitlines()[-1][:160] if why.strip() else ""


def summary(names: list[str], results: Results, options: argparse.Namespace) -> int:
    """Say what came of it; 1 if a part failed."""
    done = {name: results.parts[name] for name in names if name in results.parts}
    bad = [name for name, part in done.items() if part.outcome in (Outcome.FAILED, Outcome.LATE)]
    unrun = [name for name, part in done.items() if part.outcome is Outcome.NOT_RUN]
    left = [name for name in names if name not in done]
    print(
        f"\n{len(done) - len(bad) - len(unrun)} of {len(names)} parts are done; results: {options.results}/gpu.json"
    )
    for title, group in (("cannot run here", unrun), ("failed", bad), ("left for the next run", left)):
        if group:
            print(f"{title}: {', '.join(group)}")
    return int(bool(bad))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a batch system ends its jobs so
    sys.exit(main())
