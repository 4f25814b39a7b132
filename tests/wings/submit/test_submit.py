"""`ddpctl submit`: what it renders, and what it refuses."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import rules
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ddp_launch_wings.submit import kubernetes, slurm, ssh
from ddp_launch_wings.submit.job import BadJobFile, megabytes, read
from rendezvous.control.formats import documents

SMALL: dict[str, Any] = {"name": "train", "image": "train:7", "script": ["train.py"], "nodes": 4}
LARGE: dict[str, Any] = {
    **SMALL,
    "nodes": "2:4",
    "max_restarts": "5/1h",
    "spares": 1,
    "rendezvous": "ddp-rendezvous.ddp-rendezvous.svc:29400",
    "resources": {"cpu": 8, "memory": "64Gi", "gpus": 8, "shm": "16Gi"},
    "env": {"NCCL_DEBUG": "WARN", "ODD": 'it\'s $HOME: "yes" #1'},
    "volumes": [{"path": "/data", "claim": "data", "read_only": True}, {"path": "/scratch", "size": "5Gi"}],
    "kubernetes": {
        "queue": "team",
        "token_secret": "train-token",
        "tls_secret": "client-tls",
        "node_selector": {"gpu": "h200"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    },
    "slurm": {"partition": "gpu", "time": "24:00:00", "setup": ["module load python"]},
    "ssh": {"hosts": ["a", "b", "c", "d", "e"]},
}
# Whatever can be said, at once.
WIDE: dict[str, Any] = {
    **LARGE,
    "workdir": "/work",
    "resources": {**LARGE["resources"], "extra": {"rdma/hca": 1, "ephemeral-storage": "1.5Ti"}},
    "volumes": [
        *LARGE["volumes"],
        {"path": "/code", "config_map": "code"},
        {"path": "/keys", "secret": "keys"},
        {"path": "/fast", "host_path": "/mnt/nvme"},
    ],
    "kubernetes": {
        **LARGE["kubernetes"],
        "priority_class": "high",
        "scheduler": "volcano",
        "service_account": "trainer",
        "secret_env": {"WANDB_API_KEY": "wandb/key"},
        "deadline_s": 86_400,
        "labels": {"team": "vision"},
        "annotations": {"example.org/note": "a: b"},
        "apart": "kubernetes.io/hostname",
        "together": "topology.kubernetes.io/zone",
        "runtime_class": "nvidia",
        "user": 20_000,
        "host_network": True,
        "capabilities": ["IPC_LOCK"],
        "image_pull_secrets": ["registry"],
    },
}
_RENDER = Path(__file__).parents[3] / "deploy" / "jobs" / "render.py"
_BATCHES = _RENDER.parents[1] / "slurm"
SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
KINDS = ("job", "jobset", "trainjob")


def rendered(data: dict[str, Any], kind: str = "job") -> list[Any]:
    job = read({**data, "kubernetes": {**data.get("kubernetes", {}), "kind": kind}})
    return list(yaml.safe_load_all(documents(kubernetes.objects(job))))


def container(objects: list[Any]) -> Any:
    (found,) = [each for _, template, _ in rules.pods(objects) for each in rules.containers(template)]
    return found


@pytest.mark.parametrize("version", ["1.35", "1.36", "1.37"])
@pytest.mark.parametrize("data", [SMALL, LARGE, WIDE])
def test_a_job_fits_the_schemas(data: dict[str, Any], version: str) -> None:
    for found in rendered(data):
        kubernetes_validate.validate(found, version, strict=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("data", [SMALL, LARGE])
def test_a_job_breaks_no_rule(data: dict[str, Any], kind: str) -> None:
    assert rules.broken(rendered(data, kind)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_pods_are_the_same_whoever_makes_them(kind: str) -> None:
    ours, theirs = (container(rendered(LARGE, each)) for each in ("job", kind))
    assert ours == theirs


def test_a_trainjob_asks_for_the_runtime_that_comes_with_it() -> None:
    _, runtime, train = rendered(LARGE, "trainjob")
    assert train["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert train["spec"]["trainer"]["args"] == container([runtime])["args"]


def test_the_launcher_takes_the_words_it_is_given() -> None:
    words = container(rendered(LARGE))["args"]
    command = [sys.executable, "-m", "launcher", "--print-config", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "2:4" in done.stdout
    assert LARGE["rendezvous"] in done.stdout


BREAKAGES = {
    "no name to be found under": lambda spec: spec.update(completionMode="NonIndexed"),
    "needs restartPolicy Never": lambda spec: spec["template"]["spec"].update(restartPolicy="OnFailure"),
    "wait for others to end": lambda spec: spec.update(parallelism=2),
    "two limits": lambda spec: spec.update(backoffLimit=3),
    "which is no container": lambda spec: spec["podFailurePolicy"]["rules"][1]["onExitCodes"].update(
        containerName="trainer"
    ),
    "exit code 0": lambda spec: spec["podFailurePolicy"]["rules"][1]["onExitCodes"].update(
        operator="In", values=[0]
    ),
    "must be in order": lambda spec: spec["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"].reverse(),
    "without its status": lambda spec: spec["podFailurePolicy"]["rules"][0]["onPodConditions"][0].pop(
        "status"
    ),
    "once they have failed": lambda spec: spec.update(podReplacementPolicy="TerminatingOrFailed"),
    "no headless service": lambda spec: spec["template"]["spec"].update(subdomain="other"),
}


@pytest.mark.parametrize("words", BREAKAGES)
def test_a_rule_about_jobs_finds_what_it_is_for(words: str) -> None:
    objects = rendered(LARGE)
    BREAKAGES[words](objects[-1]["spec"])
    assert any(words in found for found in rules.broken(objects))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"nodse": 3}, "unknown key 'nodse'; did you mean nodes?"),
    ({"nodes": "four"}, 'write "4", or "2:4"'),
    ({"nodes": "4:2"}, "nodes = '4:2'"),
    ({"name": "My_Job"}, "'My_Job'"),
    ({"script": []}, "script is missing"),
    ({"resources": {"memory": "lots"}}, "memory = 'lots' is invalid"),
    ({"resources": {"gpus": "many"}}, "gpus = 'many'"),
    ({"resources": 3}, "[resources]: expected a table"),
    ({"volumes": {"path": "/x"}}, "[[volumes]]"),
    ({"volumes": [{"claim": "x"}]}, "[[volumes]] 1: missing: path"),
    ({"env": {"A-B": "1"}}, "'A-B'"),
    ({"kubernetes": {"kind": "pod"}}, "write job, jobset or trainjob"),
    ({"slurm": {"requeue": "yes"}}, "requeue = 'yes'"),
    ({"spares": -1}, "spares and gpus"),
    ({"max_restarts": -1}, 'write "5", or "5/1h"'),
    ({"name": "7b"}, "invalid name"),
    ({"name": "train\n"}, "invalid name"),
    ({"name": "x" * 52, "nodes": 2000}, "1 characters too long for 2000 machines"),
    ({"nodes": True}, "nodes = True: expected a string"),
    ({"ranks_per_node": "all"}, "write a number, auto"),
    ({"partition": "gpu"}, "it belongs below [slurm]"),
    ({"script": ["a\0b"]}, "NUL"),
    ({"options": ["--nnodes=3"]}, "set `nodes`"),
    ({"options": ["--rdzv_id", "x"]}, "set `name`"),
    ({"options": ["--"]}, "options: remove `--`"),
    ({"env": {"DDP_RENDEZVOUS_TOKEN": "x"}}, "others can read manifests"),
    ({"env": {"DDP_RENDEZVOUS_SECRET": "x"}}, "others can read manifests"),
    ({"resources": {"memory": "8K"}}, "memory = '8K' is invalid"),
    ({"resources": {"memory": "500m"}}, "is less than 1Mi"),
    ({"kubernetes": {"user": 2**31}}, "must be at most"),
    ({"kubernetes": {"deadline_s": 2**31}}, "must be at most"),
    ({"kubernetes": {"namespace": ""}}, "namespace = "),
    ({"script": [""]}, "script is missing"),
    ({"script": ["t.py", "x" * 131_072]}, "script: an argument is longer than"),
    ({"options": ["é" * 65_536]}, "options: an argument is longer than"),
    ({"env": {"LONG": "x" * 131_067}}, "LONG is longer than"),
    ({"resources": {"extra": {"rdma/hca": 1.5}}}, "rdma/hca = '1.5': write it as"),
    ({"env": {"JOB_UID": "1"}}, "JOB_UID is reserved"),
    ({"image": "train 7"}, "image = "),
    ({"resources": {"cpu": "8Gi"}}, "cpu = '8Gi'"),
    ({"resources": {"memory": "1Gi", "shm": "2Gi"}}, "is more than memory"),
    ({"resources": {"extra": {"rdma": 1}}}, 'write it as "rdma/hca" = 1'),
    ({"resources": {"extra": {"hugepages-2Mi": "some"}}}, "hugepages-2Mi = 'some' is invalid"),
    ({"volumes": [{"path": "data", "claim": "x"}]}, "use an absolute path"),
    ({"volumes": [{"path": "/dev/shm"}]}, "/dev/shm is already in use"),
    ({"volumes": [{"path": "/x"}, {"path": "/x/"}]}, "/x is already in use"),
    ({"volumes": [{"path": "/x", "claim": "a", "secret": "b"}]}, "claim and secret exclude each other"),
    ({"volumes": [{"path": "/x", "claim": "My Data"}]}, "is not a Kubernetes object name"),
    ({"volumes": [{"path": "/x", "read_only": True}]}, "read_only"),
    ({"kubernetes": {"namespace": "Team A"}}, "is not a Kubernetes object name"),
    ({"kubernetes": {"grace_s": 30}}, "grace_s = 30"),
    ({"kubernetes": {"wait": "soon"}}, "invalid wait"),
    ({"kubernetes": {"user": 0}}, "user must be"),
    ({"kubernetes": {"host_network": True}}, "set rendezvous"),
    ({"kubernetes": {"secret_env": {"KEY": "wandb"}}}, 'write "SECRET/KEY"'),
    ({"env": {"K": "1"}, "kubernetes": {"secret_env": {"K": "a/b"}}}, "is in [env] and in secret_env"),
    ({"kubernetes": {"labels": {"team": "a b"}}}, "labels: team"),
    ({"slurm": {"partition": "gpu\n#SBATCH --uid=0"}}, "partition"),
    ({"slurm": {"options": ["--comment=a\nrm -rf /"]}}, "--name=value"),
    ({"slurm": {"signal_s": 0}}, "signal_s = 0"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_a_job_file_that_cannot_be_meant_is_refused_in_words(change: dict[str, Any], words: str) -> None:
    with pytest.raises(BadJobFile) as refused:
        read({**SMALL, **change})
    assert words in str(refused.value)


@pytest.mark.parametrize(("text", "expected"), [("16Gi", 16384), ("1G", 954), ("1024", 1), ("512Mi", 512)])
def test_memory_in_the_units_of_slurm(text: str, expected: int) -> None:
    assert megabytes(text) == expected


@pytest.mark.parametrize(("cpu", "expected"), [("500m", 1), ("2.5", 3), (4, 4)])
def test_slurm_counts_whole_processors_and_no_fewer_than_were_asked_for(cpu: object, expected: int) -> None:
    job = read({**SMALL, "resources": {"cpu": cpu}})
    assert f"#SBATCH --cpus-per-task={expected}\n" in slurm.script(job)


def test_a_slurm_script_says_what_the_job_file_says() -> None:
    text = slurm.script(read(LARGE))
    for words in (
        "--nodes=2-5",
        "--mem=65536M",
        "--gpus-per-node=8",
        "--partition=gpu",
        "--requeue",
        "USR1@",
    ):
        assert words in text
    assert text.index("module load python") < text.index("srun")
    shown = subprocess.run(
        ["bash", "-c", text.split("module load")[0] + 'printf %s "$ODD"'], capture_output=True, text=True
    )
    assert shown.stdout == LARGE["env"]["ODD"]


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        (["a", "b"], "too few"),
        (["-oProxyCommand=x"] * 5, "is not a valid host name"),
        ([], "hosts is missing"),
    ],
)
def test_hosts_that_cannot_be_meant_are_refused(hosts: list[str], words: str) -> None:
    with pytest.raises(BadJobFile, match=words):
        ssh.command(read({**LARGE, "ssh": {"hosts": hosts}}), "run")


STRANGE = (
    "it's",
    "$(JOB_UID) $$ $HOME",
    "a\nb",
    "",
    "yes",
    "é ☃ \u2028",
    '"',
    "1e3",
    "- x: #",
    "\\",
    "--",
    "%j",
)


def expanded(text: str, variables: dict[str, str]) -> str:
    """As the kubelet does it: $(NAME) of a variable that there is, and two dollars for one."""
    found, i = "", 0
    while i < len(text):
        if text[i] == "$" and text[i + 1 : i + 2] == "$":
            found, i = found + "$", i + 2
        elif text[i : i + 2] == "$(" and (name := text[i + 2 :].partition(")")[0]) in variables:
            found, i = found + variables[name], i + len(name) + 3
        else:
            found, i = found + text[i], i + 1
    return found


def test_strange_words_arrive_in_a_pod_as_they_were_written() -> None:
    said = {f"ODD{i}": word for i, word in enumerate(STRANGE)}
    found = container(rendered({**SMALL, "script": ["t.py", *STRANGE], "env": said}))
    variables = {each["name"]: each.get("value", "uid") for each in found["env"]}
    words = [expanded(each, variables) for each in found["args"]]
    assert tuple(words[-len(STRANGE) :]) == STRANGE
    assert words[words.index("--rdzv-id") + 1] == "train-uid"
    assert {name: expanded(variables[name], variables) for name in said} == said


def test_strange_words_arrive_in_a_step_as_they_were_written(tmp_path: Path) -> None:
    """The step is played by a program that writes down what it is given."""
    said = {f"ODD{i}": word for i, word in enumerate(STRANGE)}
    text = slurm.script(read({**SMALL, "script": ["t.py", *STRANGE], "env": said}))
    (tmp_path / "srun").write_text(
        f"#!{sys.executable}\nimport json, os, sys\njson.dump([sys.argv[1:], dict(os.environ)], sys.stdout)\n"
    )
    (tmp_path / "srun").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    environ |= {"SLURM_CPUS_PER_TASK": "4", "SLURM_JOB_NAME": "train"}
    done = subprocess.run(["bash"], input=text, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    words, variables = json.loads(done.stdout)
    assert tuple(words[-len(STRANGE) :]) == STRANGE
    assert words[words.index("--rdzv-id") + 1] == "train-7-0"
    assert {name: variables[name] for name in said} == said
    assert "PRIVATE KEY" in variables["DDP_RENDEZVOUS_SECRET"]


def test_ssh_shows_no_value_in_its_words() -> None:
    job = read({**SMALL, "env": {"KEY": "s3cret"}, "ssh": {"hosts": ["a", "b", "c", "d"]}})
    assert "s3cret" not in " ".join(ssh.command(job, "run"))
    assert "--send-env KEY" in " ".join(ssh.command(job, "run"))
    assert "KEY=s3cret ddp-launch" in ssh.render(job, "run")


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_job_can_do_without_may_be_missing(kind: str) -> None:
    ((_, _, fixed),) = rules.pods(rendered(SMALL, kind))
    assert "successPolicy" not in fixed
    assert fixed["maxFailedIndexes"] == 0
    ((_, _, elastic),) = rules.pods(rendered(LARGE, kind))
    assert elastic["successPolicy"]["rules"] == [{"succeededCount": 2}]
    assert elastic["maxFailedIndexes"] == 5 - 2


def test_pods_wait_for_pods_and_go_on_smaller_at_once() -> None:
    words = " ".join(container(rendered(LARGE))["args"])
    assert "--join-timeout 1d --replacement-timeout 1d --shrink-after 0s" in words
    asked = " ".join(container(rendered({**LARGE, "options": ["--replacement-timeout=2m"]}))["args"])
    assert asked.count("--replacement-timeout") == 1
    assert "--shrink-after" not in asked


def test_the_exit_codes_that_replace_a_pod_are_no_jobs_last_word() -> None:
    *_, job = objects = rendered(SMALL)
    words = container(objects)["args"]
    codes = job["spec"]["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"]
    assert words[words.index("--reserved-exit-codes") + 1] == ",".join(map(str, codes))
    assert not {0, 1, 2, 77, 78} & set(codes)


def test_pods_that_serve_each_other_have_a_secret_of_their_own() -> None:
    def mounted(data: dict[str, Any]) -> list[str]:
        return [each["name"] for each in container(rendered(data))["volumeMounts"]]

    assert "rendezvous-secret" in mounted(SMALL)
    assert "rendezvous-secret" not in mounted({**SMALL, "nodes": 1})
    assert "rendezvous-secret" not in mounted(LARGE)


def test_all_that_can_be_said_arrives() -> None:
    *around, job = rendered(WIDE)
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    found = container([*around, job])
    assert spec["activeDeadlineSeconds"] == 86_400
    assert (pod["schedulerName"], pod["runtimeClassName"], pod["priorityClassName"]) == (
        "volcano",
        "nvidia",
        "high",
    )
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == 20_000
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert pod["topologySpreadConstraints"][0]["topologyKey"] == "kubernetes.io/hostname"
    assert "zone" in str(pod["affinity"])
    assert found["workingDir"] == "/work"
    assert found["resources"]["limits"]["rdma/hca"] == "1"
    assert found["resources"]["limits"]["ephemeral-storage"] == "1.5Ti"
    assert found["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    keyed = next(each for each in found["env"] if each["name"] == "WANDB_API_KEY")
    assert keyed["valueFrom"]["secretKeyRef"] == {"name": "wandb", "key": "key"}
    for meta in (job["metadata"], spec["template"]["metadata"]):
        assert meta["labels"]["team"] == "vision"
        assert meta["annotations"]["example.org/note"] == "a: b"
    assert job["metadata"]["annotations"]["kueue.x-k8s.io/job-min-parallelism"] == "2"


numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
scalars = st.text() | numbers | st.booleans() | st.none()
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.lists(st.dictionaries(st.text(), values, min_size=1, max_size=3), min_size=1, max_size=2))
def test_yaml_is_read_back_as_it_was_meant(objects: list[dict[str, Any]]) -> None:
    assert list(yaml.safe_load_all(documents(objects))) == objects


def test_the_written_examples_are_what_it_renders() -> None:
    """`python deploy/jobs/render.py` writes them anew."""
    made: dict[Any, str] = runpy.run_path(str(_RENDER))["rendered"]()
    assert len(made) == 4 * len(list(_RENDER.parent.glob("*.toml")))
    for path, text in made.items():
        assert path.read_text() == text, path
    written = {*(_RENDER.parent / "kubernetes").iterdir(), *_BATCHES.glob("*.sbatch")}
    assert written == set(made)


@pytest.mark.skipif(SHELLCHECK is None, reason="no shellcheck on this machine")
def test_the_scripts_for_slurm_have_no_trap_of_the_shell() -> None:
    for path in _BATCHES.glob("*.sbatch"):
        subprocess.run([str(SHELLCHECK), str(path)], check=True)


@pytest.mark.parametrize("kind", KINDS)
def test_only_its_own_pods_reach_its_ranks(kind: str) -> None:
    """Torch's store and the ports of Gloo and NCCL ask nobody who they are."""
    objects = rendered(LARGE, kind)
    (fence,) = [each["spec"] for each in objects if each["kind"] == "NetworkPolicy"]
    ((_, template, _),) = rules.pods(objects)
    assert rules.matches(fence["podSelector"], template["metadata"]["labels"])
    assert fence["ingress"][0]["from"][0]["podSelector"] == fence["podSelector"]
    open_to_all = {**LARGE, "kubernetes": {**LARGE["kubernetes"], "fenced": False}}
    assert "NetworkPolicy" not in {each["kind"] for each in rendered(open_to_all, kind)}


@pytest.mark.parametrize(
    ("options", "port"),
    [
        ([], 0),
        (["--health-port", "9100"], 9100),
        (["--health_port=0.0.0.0:9101"], 9101),
        (["--health-port", "[::]:9102", "--log-dir", "/logs"], 9102),
    ],
)
def test_who_watches_pods_gets_to_the_port_for_it_and_no_other(options: list[str], port: int) -> None:
    objects = rendered({**LARGE, "options": options}, "job")
    (fence,) = [each["spec"] for each in objects if each["kind"] == "NetworkPolicy"]
    watchers = [rule for rule in fence["ingress"] if "namespaceSelector" in rule["from"][0]]
    assert [rule["ports"] for rule in watchers] == ([[{"port": port}]] if port else [])


@pytest.mark.parametrize(
    ("options", "asks"),
    [
        ([], False),
        (["--health-source", "kubernetes"], True),
        (["--health_source=http://127.0.0.1:9400/metrics,kubernetes"], True),
        (["--health-source", "/run/kubernetes"], False),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_only_agents_that_read_their_node_get_a_token_of_the_api(
    kind: str, options: list[str], asks: bool
) -> None:
    objects = rendered({**LARGE, "options": options}, kind)
    ((_, template, _),) = rules.pods(objects)
    assert template["spec"]["automountServiceAccountToken"] is asks
    named = [each for each in container(objects)["env"] if each["name"] == "NODE_NAME"]
    assert named == (
        [{"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}] if asks else []
    )


def test_the_account_that_reads_nodes_can_read_nothing_else() -> None:
    path = Path(__file__).parents[3] / "deploy" / "jobs" / "node-reader.yaml"
    account, role, binding = list(yaml.safe_load_all(path.read_text()))
    for found in (account, role, binding):
        kubernetes_validate.validate(found, "1.37", strict=True)
    assert role["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    ((subject),) = binding["subjects"]
    assert (subject["name"], subject["namespace"]) == (
        account["metadata"]["name"],
        account["metadata"]["namespace"],
    )
