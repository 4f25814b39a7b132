"""Break one decision of the product at a time, in a copy of the tree, and say which test notices.

    .venv/bin/python tests/product_mutants.py [WORD ...]     # those whose name has one of the words; default: all

Each mutant names the cheapest tests that must catch it, all of them part of `make test`. Where they do, the same fault
need not be played by jobs of real processes in every run. tests/sim has tables of its own, of the state machines.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = (
    *("launcher", "rendezvous", "ddp", "ddp_launch_wings", "_ddp_launch_entry.py", "tests", "docs"),
    "pyproject.toml",
)

# The file; the tests that must notice, below tests/; and for each mutant its name, what stands once in the file, and
# what stands there instead.
MUTANTS: tuple[tuple[str, str, list[tuple[str, str, str]]], ...] = (
    ("launcher/failure/verdict.py", "core/test_verdict.py", [
        ("SIGKILL by the kernel's out-of-memory killer is like any other",
         "if code == 128 + signal.SIGKILL and end.oom_killed:", "if False:"),
        ("what is raised after our stop counts as a cause",
         "if not (end.stopped_by_us or end.is_paused) or _ends_by_itself(end):", "if True:"),
        ("the exception of an error file does not win over what was printed",
         "if record is None or (end.exit_code is None and end.uncaught is False):", "if True:"),
        ("a handled exception explains the end",
         "if end.uncaught is not False or account.failure is FailureClass.CONSEQUENCE:", "if True:"),
    ]),
    ("launcher/failure/symptoms.py", "core/test_verdict.py", [
        ("lack of memory is a user's exception",
         'if raised.short_type.endswith("MemoryError") or _any(words, _MEMORY):', "if False:"),
        ("a peer that is gone is a cause",
         "if _any(words, _PEER_GONE) or (in_collective and _any(words, _PEER_GONE_IN_COLLECTIVE)):", "if False:"),
        ("a full /dev/shm is a full disk",
         "if any(_any(place, _IN_SHARED_MEMORY) for place in places):", "if False:"),
    ]),
    ("launcher/failure/verdict.py", "core/test_watchdog_report.py", [
        ("an error of NCCL at a peer is this rank's",
         "Doubt.CULPRIT if may_be_at_peer(raised) else None\n\n", "None\n\n"),
        ("the watchdog's timeout is an error of this rank", 'if "hang" in why:', "if False:"),
    ]),
    ("launcher/failure/crash_text.py", "core/test_verdict.py", [
        ("a file that hides a module is not looked for", "if name in hiding:", "if False:"),
    ]),
    ("rendezvous/diagnosing/diagnosis.py", "core/test_diagnosis.py core/test_hang_evidence.py", [
        ("a debugged or traced rank is judged like others",
         'if any(report.process == "t" for report in running):', "if False:"),
    ]),
    ("rendezvous/diagnosing/diagnosis.py", "core/test_diagnosis.py core/test_examination.py", [
        ("a job that somebody stops is not left alone",
         "if all(report.is_stopped for report in running) and len(running) > 1:", "if False:"),
    ]),
    ("rendezvous/diagnosing/diagnosis.py", "core/test_diagnosis.py", [
        ("ranks in different collectives are not told apart", "if len(kinds) > 1 and waiting:", "if False:"),
        ("a minority is not blamed for a deadlock",
         "if n_common * 2 > len(stuck) and n_common < len(stuck):", "if False:"),
    ]),
    ("rendezvous/diagnosing/waits.py", "core/test_diagnosis.py", [
        ("all members of a broadcast are waited for",
         'if awaited.op == "broadcast" and awaited.peer in last and _is_behind(last[awaited.peer], call.seq):',
         "if False:"),
        ("only who has used a group is its member",
         "if group.members and (listed := ranks_in(group.members)):", "if False:"),
    ]),
    ("launcher/health/stall_detection.py", "core/test_stall_detection.py", [
        ("off is not off", "if not budgets.enabled:\n", "if False:\n"),
        ("a section's own time limit does not count",
         "if view.section is not None and view.section.timeout_s is not None:\n", "if False:\n"),
    ]),
    ("launcher/health/stall_detection.py",
     "core/test_signs_of_life.py core/test_stall_detection.py", [
        ("a rank that computes is called stalled",
         "return replace(state, stalled_s=0.0) if computes(before, now, passed_s) else state", "return state"),
    ]),
    ("rendezvous/rounds/policy.py", "core/test_policy.py", [
        ("a crash loop is not noticed", "if rule.times <= 0 or streak.times < rule.times:", "if True:"),
    ]),
    ("rendezvous/rounds/policy.py", "core/test_standstill.py core/test_policy.py core/test_healing.py", [
        ("a job without a further step is healed for ever",
         "if state.standstill.times >= _MOST_WITHOUT_STEP:", "if False:"),
    ]),
    ("rendezvous/rounds/healing.py", "core/test_healing.py sim/test_scenarios.py", [
        ("a user's exception is healed",
         "if cause.failure is FailureClass.USER_EXCEPTION and rule is not PolicyAction.HEAL:", "if False:"),
    ]),
    ("rendezvous/rounds/admission.py", "core/test_machine_rounds.py core/test_endpoints.py", [
        ("an unhealthy node runs ranks", "if not facts.healthy and exclusion is None:", "if False:"),
        ("a node rank is given twice", "if owner is None or owner == node:", "if True:"),
    ]),
    ("rendezvous/rounds/admission.py", "core/test_machine_rounds.py", [
        ("those who wait hear of every refusal",
         "if state.phase is not Phase.FORMING or refusal.exit_code != UNUSABLE:",
         "if state.phase is not Phase.FORMING:"),
    ]),
    ("rendezvous/rounds/admission.py", "core/test_healing.py", [
        ("the times of heals stay on the clock of another service",
         "heal_times=tuple(at + by_s for at in state.heal_times),", "heal_times=state.heal_times,"),
    ]),
    ("rendezvous/rounds/policy.py", "core/test_machine_failures.py", [
        ("a node that is left out counts as one that comes back",
         "if member and member.node_rank is None and node not in state.excluded and node != without:",
         "if member and member.node_rank is None and node != without:"),
    ]),
    ("rendezvous/rounds/admission.py", "core/test_disagreement.py", [
        ("specs that disagree form one job", "if state.spec is not None and event.spec != state.spec:", "if False:"),
    ]),
    ("launcher/supervision.py", "core/test_supervision.py", [
        ("an older assignment is taken", "if assignment.generation <= state.generation:", "if False:"),
        ("rank 0's node does not open the store", "if mine.node_rank == 0:", "if False:"),
    ]),
    ("rendezvous/session_replay.py", "core/test_session.py", [
        ("reports are not sent again to a service that was away",
         "return (joined, *self.reports, *health,", "return (joined, *health,"),
    ]),
    ("rendezvous/client/session_rules.py", "core/test_session.py", [
        ("an agent gives up a service that it has reached", "if state.was_reached:\n", "if False:\n"),
    ]),
    ("launcher/settings/values.py", "core/test_options_values.py core/test_options.py", [
        ("more ranks than the machine permits", "if number > MAX_RANKS_PER_NODE:", "if False:"),
        ("--nnodes MAX:MIN is taken", "if least > most:", "if False:"),
    ]),
    ("launcher/ranks/worker_env.py", "core/test_worker_env.py", [
        ("OMP_NUM_THREADS of the user is overwritten",
         'if "OMP_NUM_THREADS" not in environ and (omp_threads or spec.nproc > 1):',
         "if omp_threads or spec.nproc > 1:"),
    ]),
    ("launcher/ranks/affinity.py", "core/test_affinity.py", [
        ("ranks that share cores are not told apart", "if len(cores) < sharers:", "if False:"),
    ]),
    ("launcher/health/node_health.py", "core/test_health_of_nodes.py", [
        ("a spike of pressure is reported at once", "(_READINGS if symptom.may_be_a_spike else 1)", "1"),
        ("a GPU that does not respond runs at full speed again", "    if not gpu.lost:\n", "    if True:\n"),
    ]),
    ("launcher/health/stop_watch.py", "core/test_stop_rules.py", [
        ("a line without an end is kept for --stop-when", "if len(rest) > _LONGEST_LINE:", "if False:"),
    ]),
    ("rendezvous/access/auth.py", "core/test_tokens.py", [
        ("a token that has expired is accepted", "if now >= grant.until:", "if False:"),
        ("a forged token is accepted",
         'if not hmac.compare_digest(_signature(f"{purpose}{key_id}.{payload}", key), signature):', "if False:"),
    ]),
    ("rendezvous/access/auth.py", "core/test_tokens.py", [
        ("a token is good for every job", "(job_id is None or self.grant.covers(job_id))", "True"),
    ]),
)  # fmt: skip


def noticed_by(copy: Path, file: str, tests: str, old: str, new: str) -> str:
    """The first test that fails; "" if none does."""
    path = copy / file
    sound = path.read_text()
    assert sound.count(old) == 1, f"{sound.count(old)} times in {file}: {old}"
    path.write_text(sound.replace(old, new))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not nightly", "-p", "no:cacheprovider"]
    try:
        words = [*command, *(f"tests/{each}" for each in tests.split())]
        done = subprocess.run(words, cwd=copy, capture_output=True, text=True, timeout=600)
    finally:
        path.write_text(sound)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    return failed[0].split()[1] if failed else ""


def main() -> int:
    asked, number, missed = sys.argv[1:], 0, 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            copied = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copied(ROOT / name, copy / name)
        for file, tests, mutants in MUTANTS:
            for name, old, new in mutants:
                if asked and not any(word in name for word in asked):
                    continue
                began = time.monotonic()
                by = noticed_by(copy, file, tests, old, new)
                number, missed = number + 1, missed + (not by)
                print(f"| {name} | {by or 'NOBODY'} | {time.monotonic() - began:.0f} s |", flush=True)
    print(f"{number} mutants, {number - missed} noticed")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
