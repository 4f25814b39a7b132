"""A job file as Kubernetes objects: an Indexed Job with its headless service, a JobSet, or a Kubeflow TrainJob. Pure.

Recovery: the agents and Kubernetes
-----------------------------------
The agents recover from failed ranks: they restart them within moments, in the same pods. Kubernetes replaces lost
pods. So a pod never restarts its container (`Never`). An evicted pod does not count (`Ignore: DisruptionTarget`). A
pod whose agent was killed, or could not reach the others, is replaced under the same index (`backoffLimitPerIndex`).
Any other exit code means that the whole job has failed (`FailJob`).

An agent exits with 0 only if the whole job has succeeded. A job does not need all its pods if it has spares or is
elastic. Then it is complete when the minimum number of pods has succeeded (`successPolicy`).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_launch_wings.submit.job import JobFile, Volume


Object = dict[str, Any]


def objects(job: JobFile) -> list[Object]:
    """The objects to create, in this order: the policy protects the pods before there are any. The last is the job."""
    policy = [_network_policy(job)] if job.kubernetes.fenced else []
    match job.kubernetes.kind:
        case "job":
            return [*policy, _service(job), _job(job)]
        case "jobset":
            return [*policy, _jobset(job)]
        case "trainjob":
            return [*policy, _runtime(job), _trainjob(job)]
        case kind:
            raise AssertionError(f"internal error: unknown kind {kind}")


def _meta(job: JobFile, **more: Any) -> Object:
    labels = {"app.kubernetes.io/name": job.name, "app.kubernetes.io/managed-by": "ddp-launch"}
    labels = job.kubernetes.labels | labels
    return {"name": job.name, "namespace": job.kubernetes.namespace, "labels": labels, **more}


def _queued(job: JobFile) -> Object:
    """Kueue may admit an elastic job with fewer pods than requested. This works only for kind = job."""
    meta, annotations = _meta(job), dict(job.kubernetes.annotations)
    if job.kubernetes.queue:
        meta["labels"]["kueue.x-k8s.io/queue-name"] = job.kubernetes.queue
        if job.min_machines < job.machines and job.kubernetes.kind == "job":
            annotations["kueue.x-k8s.io/job-min-parallelism"] = str(job.min_machines)
            annotations["kueue.x-k8s.io/job-completions-equal-parallelism"] = "true"
    return meta | ({"annotations": annotations} if annotations else {})


def _service(job: JobFile) -> Object:
    """The headless service that gives pods their names. Pods need the names before they are ready."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"batch.kubernetes.io/job-name": job.name},
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": _meta(job), "spec": spec}


def _network_policy(job: JobFile) -> Object:
    """The network policy: torch's store, Gloo and NCCL do not authenticate, so only pods of the job may connect."""
    ours = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": job.name, "ddp-launch/role": "worker"}}}
    ingress: list[Object] = [{"from": [ours]}]
    if port := _health_port(job):
        watchers = {"namespaceSelector": {"matchLabels": {"ddp-launch/monitoring": "allowed"}}}
        ingress.append({"from": [watchers], "ports": [{"port": port}]})
    spec = {**ours, "policyTypes": ["Ingress"], "ingress": ingress}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _meta(job),
        "spec": spec,
    }


def _health_port(job: JobFile) -> int:
    """The port of `--health-port [ADDRESS:]PORT`; 0 if it is not set."""
    words = " ".join(job.options).replace("_", "-")
    found = re.search(r"--health-port[ =](?:\S*:)?(\d{1,5})(?!\S)", words, re.ASCII)
    return int(found[1]) if found else 0


def _job(job: JobFile) -> Object:
    spec = _job_spec(job)
    spec["template"]["spec"]["subdomain"] = job.name
    spec["ttlSecondsAfterFinished"] = job.kubernetes.keep_s
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _queued(job), "spec": spec}


def _jobset(job: JobFile) -> Object:
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": job.name, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": 0},  # the agents recover the job; the JobSet must not restart it
        "ttlSecondsAfterFinished": job.kubernetes.keep_s,
        "replicatedJobs": [{"name": CONTAINER, "replicas": 1, "template": {"spec": _job_spec(job)}}],
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _queued(job),
        "spec": spec,
    }


def _runtime(job: JobFile) -> Object:
    """The TrainingRuntime: how the pods run. The TrainJob refers to it and sets the size."""
    spec = _job_spec(job)
    step = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    replicated = {"name": CONTAINER, "template": {"metadata": step, "spec": spec}}
    made = {"network": {"publishNotReadyAddresses": True}, "failurePolicy": {"maxRestarts": 0}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": _meta(job, name=f"{job.name}-runtime"),
        "spec": {
            "mlPolicy": {"numNodes": job.machines},
            "template": {"spec": {**made, "replicatedJobs": [replicated]}},
        },
    }


def _trainjob(job: JobFile) -> Object:
    runtime = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": f"{job.name}-runtime"}
    trainer = {"image": job.image, "numNodes": job.machines, "args": arguments(job)}
    spec = {"runtimeRef": runtime, "trainer": trainer}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _queued(job),
        "spec": spec,
    }


def _job_spec(job: JobFile) -> Object:
    evicted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    codes = {"containerName": CONTAINER, "operator": "NotIn", "values": list(REPLACED)}
    dispensable = job.machines - job.min_machines
    spec: Object = {
        "completionMode": "Indexed",
        "completions": job.machines,
        "parallelism": job.machines,
        "backoffLimitPerIndex": job.kubernetes.replace,
        "maxFailedIndexes": dispensable,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": [evicted, {"action": "FailJob", "onExitCodes": codes}]},
        "template": template(job),
    }
    if dispensable:
        spec["successPolicy"] = {"rules": [{"succeededCount": job.min_machines}]}
    if job.kubernetes.deadline_s:
        spec["activeDeadlineSeconds"] = job.kubernetes.deadline_s
    return spec


# --- pods -------------------------------------------------------------------------------------------
#
# The pods of a job: one per machine, running `ddp-launch`. Pure. The same for every kind of Kubernetes job.

CONTAINER = "node"  # as Kubeflow Trainer calls it, too
# Exit codes of an agent after which its pod is replaced. 71: no rank could be started here. 75: the rendezvous was
# unreachable. 137, 143: the agent was killed by SIGKILL or SIGTERM.
REPLACED = (71, 75, 137, 143)
_STOPPING_S = 15  # of the pod's grace: what is left when the checkpoint is written
_SECRETS = "/etc/ddp-launch"
_OWN_SECRET = "secret"  # the key
# Also under a JobSet or a TrainJob, which create one Job, and another one when they restart.
_JOB_UID = "metadata.labels['batch.kubernetes.io/controller-uid']"


def own_secret(job: JobFile) -> str:
    """The name of the Secret for pods that run the rendezvous themselves; "" if they do not need one."""
    alone = job.machines == 1
    return "" if alone or job.kubernetes.rendezvous or job.rendezvous else f"{job.name}-rendezvous"


def template(job: JobFile) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": job.name, "ddp-launch/role": "worker"}
    meta: dict[str, Any] = {"labels": job.kubernetes.labels | labels}
    if job.kubernetes.annotations:
        meta["annotations"] = dict(job.kubernetes.annotations)
    return {"metadata": meta, "spec": _pod(job)}


def _pod(job: JobFile) -> dict[str, Any]:
    where = job.kubernetes
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": _asks_kubernetes(job),
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": where.grace_s,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": where.user,
            "runAsGroup": where.user,
            "fsGroup": where.user,
            "fsGroupChangePolicy": "OnRootMismatch",  # otherwise the kubelet visits every file of a large volume
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(job)],
        "volumes": _volumes(job),
    }
    if where.host_network:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    named = {
        "serviceAccountName": where.service_account,
        "priorityClassName": where.priority_class,
        "schedulerName": where.scheduler,
        "runtimeClassName": where.runtime_class,
        "nodeSelector": dict(where.node_selector),
        "tolerations": [dict(each) for each in where.tolerations],
        "imagePullSecrets": [{"name": name} for name in where.image_pull_secrets],
    }
    return spec | _places(job) | {key: value for key, value in named.items() if value}


def _asks_kubernetes(job: JobFile) -> bool:
    """With `--health-source kubernetes` the agent reads the Node object of its pod."""
    words = " ".join(job.options).replace("_", "-")
    return re.search(r"--health-source[ =](?:\S*,)?kubernetes(?![^\s,])", words) is not None


def _places(job: JobFile) -> dict[str, Any]:
    """Placement: spread pods for availability, or keep them together for a fast network."""
    ours = {"matchLabels": {"app.kubernetes.io/name": job.name, "ddp-launch/role": "worker"}}
    found: dict[str, Any] = {}
    if job.kubernetes.apart:
        spread = {"maxSkew": 1, "topologyKey": job.kubernetes.apart, "whenUnsatisfiable": "ScheduleAnyway"}
        found["topologySpreadConstraints"] = [{**spread, "labelSelector": ours}]
    if job.kubernetes.together:
        term = {"topologyKey": job.kubernetes.together, "labelSelector": ours}
        near = [{"weight": 100, "podAffinityTerm": term}]
        found["affinity"] = {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": near}}
    return found


def _container(job: JobFile) -> dict[str, Any]:
    wanted = {"cpu": job.resources.cpu, "memory": job.resources.memory, **job.resources.extra}
    if job.resources.gpus:
        wanted[job.resources.gpu_resource] = str(job.resources.gpus)
    capabilities: dict[str, Any] = {"drop": ["ALL"]}
    if job.kubernetes.capabilities:
        capabilities["add"] = list(job.kubernetes.capabilities)
    return {
        "name": CONTAINER,
        "image": job.image,
        "command": ["ddp-launch"],
        "args": arguments(job),
        **({"workingDir": job.workdir} if job.workdir else {}),
        "env": _environment(job),
        "resources": {"requests": dict(wanted), "limits": dict(wanted)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": capabilities,
        },
        "volumeMounts": [
            {"name": name, "mountPath": path, **({"readOnly": True} if read_only else {})}
            for name, path, read_only in _mounts(job)
        ],
    }


def arguments(job: JobFile) -> list[str]:
    """The arguments of ddp-launch. The job id contains the uid: a new job of the same name is another job."""
    where = job.kubernetes
    meet_at = where.rendezvous or job.rendezvous
    ours = [
        *(("--rendezvous", meet_at) if meet_at else ()),
        *("--rdzv-id", f"{job.name}-$(JOB_UID)"),
        *(
            "--checkpoint-grace",
            f"{where.grace_s - 2 * _STOPPING_S}s",
            "--shutdown-timeout",
            f"{_STOPPING_S}s",
        ),
        *_timeouts(job),
    ]
    options, script = (tuple(map(_literal, words)) for words in (job.options, job.script))
    return replace(job, options=options, script=script).launch(*ours)


def _timeouts(job: JobFile) -> list[str]:
    """The timeouts of pods. Pods may wait long for capacity, so the timeout for the required pods is long."""
    given = {word.partition("=")[0].replace("_", "-") for word in job.options}
    options = [("--join-timeout", job.kubernetes.wait), ("--replacement-timeout", job.kubernetes.wait)]
    if job.is_elastic and "--replacement-timeout" not in given:
        options.append(("--shrink-after", "0s"))  # do not wait for the others
    codes = ",".join(map(str, REPLACED))
    options.append(("--reserved-exit-codes", codes))
    return [word for flag, value in options if flag not in given for word in (flag, value)]


def _literal(text: str) -> str:
    """Escape $: Kubernetes replaces $(NAME) by a variable, and $$ by one dollar."""
    return re.sub(r"\$(?=[($])", "$$", text)


def _environment(job: JobFile) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"name": "JOB_UID", "valueFrom": {"fieldRef": {"fieldPath": _JOB_UID}}}]
    if _asks_kubernetes(job):
        found.append({"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}})
    said = {"HOME": "/tmp"}
    if job.kubernetes.token_secret:
        said["DDP_RENDEZVOUS_TOKEN_FILE"] = f"{_SECRETS}/token/token"
    if job.kubernetes.tls_secret:
        said["DDP_RENDEZVOUS_CA_FILE"] = f"{_SECRETS}/tls/ca.crt"
        said["DDP_RENDEZVOUS_CERT_FILE"] = f"{_SECRETS}/tls/tls.crt"
        said["DDP_RENDEZVOUS_KEY_FILE"] = f"{_SECRETS}/tls/tls.key"
    if own_secret(job):
        said["DDP_LAUNCH_SECRET_FILE"] = f"{_SECRETS}/rendezvous/{_OWN_SECRET}"
    found += [{"name": name, "value": _literal(value)} for name, value in (said | job.env).items()]
    for name, source in job.kubernetes.secret_env.items():
        secret, _, key = source.partition("/")
        found.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    return found


def _mounts(job: JobFile) -> list[tuple[str, str, bool]]:
    found = [("shm", "/dev/shm", False)]
    if all(each.path.rstrip("/") != "/tmp" for each in job.volumes):
        found.append(("tmp", "/tmp", False))
    if job.kubernetes.token_secret:
        found.append(("rendezvous-token", f"{_SECRETS}/token", True))
    if job.kubernetes.tls_secret:
        found.append(("rendezvous-tls", f"{_SECRETS}/tls", True))
    if own_secret(job):
        found.append(("rendezvous-secret", f"{_SECRETS}/rendezvous", True))
    return found + [
        (f"volume-{i}", each.path, each.read_only or bool(each.config_map or each.secret))
        for i, each in enumerate(job.volumes)
    ]


def _volumes(job: JobFile) -> list[dict[str, Any]]:
    limit = {"sizeLimit": job.resources.shm} if job.resources.shm else {}
    sources: dict[str, dict[str, Any]] = {
        "shm": {"emptyDir": {"medium": "Memory", **limit}},
        "tmp": {"emptyDir": {}},
        "rendezvous-token": _secret(job.kubernetes.token_secret),
        "rendezvous-tls": _secret(job.kubernetes.tls_secret),
        "rendezvous-secret": _secret(own_secret(job)),
    }
    sources |= {f"volume-{i}": _source(each) for i, each in enumerate(job.volumes)}
    return [{"name": name, **sources[name]} for name, _, _ in _mounts(job)]


def _secret(name: str) -> dict[str, Any]:
    return {"secret": {"secretName": name, "defaultMode": 0o440}}


def _source(volume: Volume) -> dict[str, Any]:
    if volume.claim:
        read_only = {"readOnly": True} if volume.read_only else {}
        return {"persistentVolumeClaim": {"claimName": volume.claim, **read_only}}
    if volume.config_map:
        return {"configMap": {"name": volume.config_map}}
    if volume.secret:
        return _secret(volume.secret)
    if volume.host_path:
        return {"hostPath": {"path": volume.host_path, "type": "Directory"}}
    return {"emptyDir": {"sizeLimit": volume.size}}
