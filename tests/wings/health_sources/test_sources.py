"""What health sources answer, and what it means for this node."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_launch_wings.health_sources.findings import NotUnderstood, findings
from launcher.health.node_health import HealthState, NodeReading, evaluate
from launcher.preflight.checkup import Grade, judge_failure, judge_source
from launcher.settings.values import BadValue, health_ignored, health_sources
from launcher.sources import HealthFinding, Opinion, Severity

UNFIT, WARNING, NOTE = Severity.UNFIT, Severity.WARNING, Severity.NOTE


def read(answer: Any, *ignored: str, host: str = "node7") -> list[tuple[Severity, str]]:
    text = answer if isinstance(answer, str) else json.dumps(answer)
    return [(each.severity, each.name) for each in findings(text, host, ignored)]


# --- Kubernetes ----------------------------------------------------------------------------------------


def condition(kind: str, status: str, **more: str) -> dict[str, str]:
    return {"type": kind, "status": status, **more}


def node(*conditions: dict[str, str], **spec: Any) -> dict[str, Any]:
    labels = spec.pop("labels", {})
    healthy = [
        condition("Ready", "True"),
        condition("MemoryPressure", "False"),
        condition("PIDPressure", "False"),
    ]
    return {
        "kind": "Node",
        "metadata": {"name": "node7", "labels": labels},
        "spec": spec,
        "status": {"conditions": [*healthy, *conditions]},
    }


@pytest.mark.parametrize(
    ("kind", "status", "severity"),
    [
        # of the kubelet
        ("NetworkUnavailable", "True", UNFIT),
        ("DiskPressure", "True", WARNING),
        ("DiskPressure", "Unknown", NOTE),
        # of node-problem-detector
        ("KernelDeadlock", "True", UNFIT),
        ("ReadonlyFilesystem", "True", UNFIT),
        ("FrequentKubeletRestart", "True", WARNING),
        ("KubeletUnhealthy", "True", WARNING),
        ("VMEventScheduled", "True", WARNING),
        ("XIDErrors", "True", UNFIT),
        ("IBLinkFlapping", "True", UNFIT),
        # of NVSentinel, which sets a condition only for fatal errors
        ("GpuMemWatch", "True", UNFIT),
        ("GpuNvlinkWatch", "True", UNFIT),
        ("SysLogsXIDError", "True", UNFIT),
        ("SysLogsGPUFallenOff", "True", UNFIT),
        ("NVSwitchFatalError", "True", UNFIT),
        ("NVSwitchNonFatalError", "True", WARNING),
        ("CSPMaintenance", "True", WARNING),
        ("DCGMError", "True", WARNING),
        # names that mean the opposite
        ("AcceleratedHardwareReady", "False", UNFIT),
        ("NetworkingReady", "False", UNFIT),
    ],
)
def test_conditions_of_a_node(kind: str, status: str, severity: Severity) -> None:
    assert read(node(condition(kind, status))) == [(severity, kind)]
    opposite = "False" if status == "True" else "True"
    good_if_true = kind.endswith("Ready")
    assert read(node(condition(kind, opposite if status != "Unknown" else str(good_if_true)))) == []
    assert read(node(condition(kind, status)), kind) == []


def test_a_healthy_node_and_one_that_is_not_ready() -> None:
    assert read(node()) == []
    assert read({"kind": "Node", "status": {"conditions": [condition("Ready", "False")]}}) == [
        (UNFIT, "Ready")
    ]
    assert read({"kind": "Node", "status": {"conditions": [condition("Ready", "Unknown")]}}) == [
        (WARNING, "Ready")
    ]
    assert read({"kind": "Node"}) == []


def test_the_reason_and_message_are_shown_in_one_line() -> None:
    told = condition(
        "GpuMemWatch", "True", reason="HardwareFailure", message="[DCGM_FR_FAULTY_MEMORY]\n GPU 0 failed"
    )
    (found,) = findings(json.dumps(node(told)), "node7")
    assert str(found) == "GpuMemWatch: HardwareFailure: [DCGM_FR_FAULTY_MEMORY] GPU 0 failed"


def test_taints_and_cordons() -> None:
    reserved = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}
    not_ready = {"key": "node.kubernetes.io/not-ready", "effect": "NoExecute"}
    broken = {"key": "nvidia.com/gpu-xid-error", "value": "true", "effect": "NoSchedule"}
    worse = {"key": "gpu.health/degraded", "effect": "PreferNoSchedule"}
    assert read(node(taints=[reserved, not_ready])) == []
    assert read(node(taints=[reserved, broken, worse])) == [
        (UNFIT, "taint nvidia.com/gpu-xid-error"),
        (WARNING, "taint gpu.health/degraded"),
    ]
    assert read(node(taints=[broken]), "nvidia.com/gpu-xid-error") == []
    assert read(node(unschedulable=True)) == [(WARNING, "cordoned")]
    label = "dgxc.nvidia.com/nvsentinel-state"
    for state, expected in (
        ("quarantined", [(UNFIT, f"label {label}")]),
        ("drain-succeeded", [(UNFIT, f"label {label}")]),
        ("remediation-succeeded", [(WARNING, "cordoned")]),
    ):
        assert read(node(unschedulable=True, labels={label: state})) == expected


def test_conditions_as_node_problem_detector_lists_them() -> None:
    page = [
        {
            "type": "KernelDeadlock",
            "status": "True",
            "transition": "2026-11-20T10:00:00Z",
            "reason": "DockerHung",
            "message": "task docker:7 blocked for more than 300 seconds",
        },
        {"type": "ReadonlyFilesystem", "status": "False", "reason": "FilesystemIsNotReadOnly", "message": ""},
    ]
    assert read(page) == [(UNFIT, "KernelDeadlock")]


# --- metrics -------------------------------------------------------------------------------------------

# As a DCGM exporter 4 writes them: each metric with its help, and with the labels of GPU and pod.
_GPU = [
    f'gpu="{at}",UUID="GPU-{at}a",pci_bus_id="00000000:3{at}:00.0",device="nvidia{at}",modelName="NVIDIA L4",'
    f'Hostname="node7",DCGM_FI_DRIVER_VERSION="580.105.08"'
    for at in range(2)
]
RECORDED = f"""\
# HELP DCGM_FI_DEV_GPU_TEMP GPU temperature (in C).
# TYPE DCGM_FI_DEV_GPU_TEMP gauge
DCGM_FI_DEV_GPU_TEMP{{{_GPU[0]}}} 41
DCGM_FI_DEV_GPU_TEMP{{{_GPU[1]}}} 43
# HELP DCGM_FI_DEV_XID_ERRORS Value of the last XID error encountered.
# TYPE DCGM_FI_DEV_XID_ERRORS gauge
DCGM_FI_DEV_XID_ERRORS{{{_GPU[0]},err_code="0",err_msg="No Error"}} 0
DCGM_FI_DEV_XID_ERRORS{{{_GPU[1]},err_code="45",err_msg="Preemptive cleanup, due to previous errors -- Most likely"}} 45
# HELP DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS Number of remapped rows for uncorrectable errors
# TYPE DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS counter
DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS{{{_GPU[0]}}} 0
# HELP DCGM_FI_DEV_ROW_REMAP_FAILURE Whether remapping of rows has failed
# TYPE DCGM_FI_DEV_ROW_REMAP_FAILURE gauge
DCGM_FI_DEV_ROW_REMAP_FAILURE{{{_GPU[0]}}} 0
DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{{{_GPU[0]}}} 9223372036854775794
DCGM_FI_DEV_CLOCK_THROTTLE_REASONS{{{_GPU[0]}}} 1
"""


def with_line(line: str) -> str:
    return RECORDED + line + "\n"


def test_a_healthy_exporter_and_its_blanks() -> None:
    assert read(RECORDED) == []


@pytest.mark.parametrize(
    ("line", "severity", "words"),
    [
        (
            'DCGM_FI_DEV_ROW_REMAP_FAILURE{gpu="3",UUID="GPU-3c"} 1',
            UNFIT,
            "GPU 3 has no spare memory rows left",
        ),
        ('DCGM_FI_DEV_ROW_REMAP_PENDING{gpu="3"} 1', UNFIT, "GPU 3 has memory rows that wait for a reset"),
        ('DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{gpu="2"} 4', UNFIT, "GPU 2 has 4 uncorrectable memory errors"),
        ('DCGM_EXP_XID_ERRORS_COUNT{gpu="0",window_size_in_ms="300000",xid="79"} 1', UNFIT, "GPU 0: Xid 79"),
        (
            'DCGM_EXP_XID_ERRORS_COUNT{gpu="0",window_size_in_ms="300000",xid="94"} 2',
            WARNING,
            "GPU 0: Xid 94",
        ),
        (
            'DCGM_FI_DEV_XID_ERRORS{gpu="1",err_msg="a } in quotes, and \\" too"} 79',
            *(WARNING, "GPU 1: the last Xid is 79: the GPU has fallen off the bus; the exporter keeps it"),
        ),
        ('DCGM_FI_DEV_XID_ERRORS{gpu="1"} 31', None, ""),
        ('DCGM_EXP_XID_ERRORS_COUNT{gpu="0",xid="31"} 9', None, ""),
        ('DCGM_EXP_GPU_HEALTH_STATUS{gpu="1",health_watch="PCIE"} 0', None, ""),
        ('DCGM_EXP_GPU_HEALTH_STATUS{gpu="1",health_watch="PCIE"} 10', WARNING, "health check 'PCIE' warns"),
        ('DCGM_EXP_GPU_HEALTH_STATUS{gpu="1",health_watch="MEM"} 20', UNFIT, "health check 'MEM' fails"),
        (
            'DCGM_FI_DEV_CLOCKS_EVENT_REASONS{gpu="1"} 64',
            WARNING,
            "GPU 1 runs slower because of its temperature",
        ),
        ('DCGM_FI_DEV_CLOCKS_EVENT_REASONS{gpu="1"} 4', None, ""),  # a power cap
        ('problem_gauge{reason="DockerHung",type="KernelDeadlock"} 1 1700000000000', UNFIT, "DockerHung"),
        ('problem_gauge{reason="KernelDeadlock",type="KernelDeadlock"} 0', None, ""),
    ],
)
def test_metrics_of_exporters(line: str, severity: Severity | None, words: str) -> None:
    found = findings(with_line(line), "node7")
    assert [each.severity for each in found] == ([] if severity is None else [severity])
    assert all(words in each.text for each in found)


def test_metrics_of_other_nodes_are_left_out() -> None:
    theirs = RECORDED + 'DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{gpu="0",Hostname="node8"} 3\n'
    assert read(theirs, host="node7.cluster.local") == []
    assert read(theirs, host="node8") == [(UNFIT, "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL")]
    with pytest.raises(NotUnderstood, match="none of them is node9"):
        read(theirs, host="node9")


# --- other answers ---------------------------------------------------------------------------------------


def test_a_script_of_ones_own() -> None:
    assert read({}) == []
    assert read({"unfit": ["the link  to the\nswitch flaps"], "warnings": ["fan 2 is slow"]}) == [
        (UNFIT, "the link to the switch flaps"),
        (WARNING, "fan 2 is slow"),
    ]


def device(number: str, **systems: Any) -> dict[str, Any]:
    errors = {"Errors": {"children": {name.replace("_", " "): each for name, each in systems.items()}}}
    return {"children": {number: {"value": "...", "children": errors}}}


def report(overall: Any, **kinds: Any) -> str:
    """As `dcgmi health -c -j` writes it."""
    return json.dumps({"header": ["Health Monitor Report"], "body": {"Overall Health": overall, **kinds}})


def test_a_report_of_dcgmi() -> None:
    assert read(report({"value": "Healthy"})) == []
    memory = {"value": "Failure", "overflow": ["GPU 1 had uncorrectable memory errors and", "needs a reset."]}
    pcie = {"value": "Warning", "overflow": ["Detected 12 PCIe replays."]}
    text = report({"value": "Failure"}, GPU=device("1", Memory_system=memory, PCIe_system=pcie))
    assert [str(each) for each in findings(text, "node7")] == [
        "dcgmi Memory: GPU 1: Failure: GPU 1 had uncorrectable memory errors and needs a reset.",
        "dcgmi PCIe: GPU 1: Warning: Detected 12 PCIe replays.",
    ]
    assert read(text) == [(UNFIT, "dcgmi Memory"), (WARNING, "dcgmi PCIe")]
    assert read(text, "Memory") == [(WARNING, "dcgmi PCIe")]
    unknown = {"value": "Internal error"}
    assert read(report(unknown, Switch=device("0", Driver=unknown))) == [(WARNING, "dcgmi Driver")]
    assert read(report({"value": "Failure"})) == [(UNFIT, "dcgmi")]  # why is not in a form that is known


def test_what_a_source_says_cannot_play_with_the_terminal() -> None:
    (found,) = findings('{"unfit": ["\\u001b[2Jgone\\u0007 ' + "x" * 300 + '"]}', "node7")
    assert str(found).startswith("[2Jgone xxx")
    assert len(str(found)) == 200
    (found,) = findings(
        json.dumps(node(condition("Gpu\x1b[1m", "True", message="\x1b]0;title\x07"))), "node7"
    )
    assert str(found).isprintable()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("", "it is empty"),
        ("<html><body>404</body></html>", "neither JSON nor metrics"),
        ("node_cpu_seconds_total 12\n", "none about health"),
        ("{", "damaged JSON"),
        ("[" * 100_000, "damaged JSON"),
        ('{"healthy": true}', "unknown key 'healthy'"),
        ('{"unfit": "yes"}', "'unfit' is not a list of strings"),
        ('{"unfit": ["a cause", " "]}', "a text in 'unfit' is empty"),
        (r'{"warnings": ["\ud800"]}', "a text in 'warnings' is empty"),
        ("[1, 2]", "not a list of conditions"),
        (
            "Error: Health watches not enabled. Please enable watches. \n",
            "it reports an Error: Health watches not enabled",
        ),
        (report({"value": None}), "a report of dcgmi with no overall health"),
        (report("Failure"), "a report of dcgmi with parts that are not objects"),
        (report({"value": "Healthy"}, GPU={"children": {"0": 1}}), "parts that are not objects"),
        (
            report({"value": "Warning"}, GPU=device("0", PCIe={})),
            "a report of dcgmi with no health of GPU 0, PCIe",
        ),
        ('{"kind": "Node", "status": [1]}', "not a Kubernetes node"),
        ('{"kind": "Status", "message": "nodes \\"a\\" is forbidden"}', 'nodes "a" is forbidden'),
    ],
)
def test_answers_that_are_not_understood_say_why(answer: str, why: str) -> None:
    with pytest.raises(NotUnderstood, match=why):
        findings(answer, "node7")


@given(st.text(max_size=200) | st.from_regex(r'[\[{]("unfit"|"kind"|:|"Node"|,|\[|\]|[{}]|1|null){0,20}'))
def test_any_text_is_findings_or_not_understood(text: str) -> None:
    with suppress(NotUnderstood):
        assert all(isinstance(each, HealthFinding) for each in findings(text, "node7"))


# --- what follows ----------------------------------------------------------------------------------------


def test_only_unfit_fails_the_check() -> None:
    bad, meh = HealthFinding(UNFIT, "GpuMemWatch", "GPU 0 failed"), HealthFinding(WARNING, "cordoned", "")
    assert judge_source("kubernetes", [bad, meh]).grade is Grade.FAIL
    assert judge_source("kubernetes", [bad, meh]).found == "GpuMemWatch: GPU 0 failed; cordoned"
    assert judge_source("kubernetes", [meh]).grade is Grade.WARN
    assert judge_source("kubernetes", [HealthFinding(NOTE, "X", "")]).grade is Grade.OK
    assert judge_source("kubernetes", []).found == "reports no problem"
    assert judge_failure("kubernetes", "no answer").grade is Grade.WARN


def test_findings_that_come_and_go_are_reported_once_each() -> None:
    def look(*found: HealthFinding, problem: str = "", answered: bool = True) -> tuple[str, ...]:
        nonlocal health, at
        at += 5.0
        opinion = Opinion("/run/health", found, problem, answered)
        health, news = evaluate(health, NodeReading(at, outside=(opinion,)))
        return news

    health, at = HealthState(), 0.0
    three = HealthFinding(UNFIT, "ECC", "GPU 0 has 3 errors", "GPU 0")
    four = HealthFinding(UNFIT, "ECC", "GPU 0 has 4 errors", "GPU 0")
    assert look(problem="refused", answered=False) == ()  # pre-flight has reported it
    assert look() == ()
    assert look(three) == ("health source /run/health: this node is unfit: ECC: GPU 0 has 3 errors",)
    assert look(four) == ()
    assert health.unfit
    assert look(four, problem="timeout") == (
        "health source /run/health does not answer: timeout; the job continues without it",
    )
    assert look(four, problem="timeout") == ()
    assert look(four) == ("health source /run/health answers again",)
    assert look() == (
        "no longer reported: health source /run/health: this node is unfit: ECC: GPU 0 has 3 errors",
    )
    assert (health.texts, health.unfit) == ((), "")


def test_the_options() -> None:
    assert health_sources("kubernetes, http://127.0.0.1:9400/metrics,/run/health.json") == (
        "kubernetes",
        "http://127.0.0.1:9400/metrics",
        "/run/health.json",
    )
    assert health_ignored("A, b.c/d") == ("A", "b.c/d")
    for wrong in (
        "",
        "k8s",
        "health.json",
        "http://",
        "http://host:x/",
        "http://u:p@host/",
        "http://a b/",
        "ftp://host/",
    ):
        with pytest.raises(BadValue):
            health_sources(wrong)
    with pytest.raises(BadValue):
        health_ignored("A,,B")
