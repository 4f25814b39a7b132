"""A job file as Kubernetes objects: an Indexed Job with its headless service, a JobSet, or a Kubeflow TrainJob. Pure.

Who heals what
--------------
A rank that fails is the agents' affair: they restart ranks within moments, in the same pods. Kubernetes replaces pods
that are gone. So a pod never restarts its container (`Never`); one that was evicted does not count
(`Ignore: DisruptionTarget`); one whose agent was killed, or could not reach the others, is replaced under the same
index (`backoffLimitPerIndex`); and any other exit code is the agents' last word about the whole job: `FailJob`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rendezvous.submit.job_file import JobFile, Volume

Objects = list[dict[str, Any]]

# 71: no rank could be started here. 75: the rendezvous was out of reach. 137, 143: the agent was killed, or told to go.
_REPLACED = [71, 75, 137, 143]
_CONTAINER = "node"  # as Kubeflow Trainer calls it, too
_USER = 10001
_STOPPING_S = 15  # of the pod's grace: what is left when the checkpoint is written
_SECRETS = "/etc/ddp-launch"
# Also under a JobSet or a TrainJob: there it is the one Job of theirs, and another one when they start all over.
_JOB_UID = "metadata.labels['batch.kubernetes.io/controller-uid']"


def objects(job: JobFile) -> Objects:
    match job.kubernetes.kind:
        case "job":
            return [_service(job), _job(job)]
        case "jobset":
            return [_jobset(job)]
        case _:
            return [_runtime(job), _trainjob(job)]


def _meta(job: JobFile, **more: Any) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": job.name, "app.kubernetes.io/managed-by": "ddp-launch"}
    return {"name": job.name, "namespace": job.kubernetes.namespace, "labels": labels, **more}


def _queued(job: JobFile) -> dict[str, Any]:
    meta = _meta(job)
    if job.kubernetes.queue:
        meta["labels"]["kueue.x-k8s.io/queue-name"] = job.kubernetes.queue
    return meta


def _service(job: JobFile) -> dict[str, Any]:
    """Gives pods their names; also before they are ready, for they become so by finding each other."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"batch.kubernetes.io/job-name": job.name},
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": _meta(job), "spec": spec}


def _job(job: JobFile) -> dict[str, Any]:
    spec = _job_spec(job)
    spec["template"]["spec"]["subdomain"] = job.name
    spec["ttlSecondsAfterFinished"] = job.kubernetes.keep_s
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _queued(job), "spec": spec}


def _jobset(job: JobFile) -> dict[str, Any]:
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": job.name, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": 0},  # starting all over is not what heals: the agents do
        "ttlSecondsAfterFinished": job.kubernetes.keep_s,
        "replicatedJobs": [{"name": _CONTAINER, "replicas": 1, "template": {"spec": _job_spec(job)}}],
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _queued(job),
        "spec": spec,
    }


def _runtime(job: JobFile) -> dict[str, Any]:
    """How jobs of this kind run; `_trainjob` says which and how large."""
    spec = _job_spec(job)
    step = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    replicated = {"name": _CONTAINER, "template": {"metadata": step, "spec": spec}}
    template = {"network": {"publishNotReadyAddresses": True}, "failurePolicy": {"maxRestarts": 0}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": _meta(job, name=f"{job.name}-runtime"),
        "spec": {
            "mlPolicy": {"numNodes": job.machines},
            "template": {"spec": {**template, "replicatedJobs": [replicated]}},
        },
    }


def _trainjob(job: JobFile) -> dict[str, Any]:
    runtime = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": f"{job.name}-runtime"}
    trainer = {"image": job.image, "numNodes": job.machines, "args": _arguments(job)}
    spec = {"runtimeRef": runtime, "trainer": trainer}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _queued(job),
        "spec": spec,
    }


def _job_spec(job: JobFile) -> dict[str, Any]:
    evicted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    codes = {"containerName": _CONTAINER, "operator": "NotIn", "values": _REPLACED}
    return {
        "completionMode": "Indexed",
        "completions": job.machines,
        "parallelism": job.machines,
        "backoffLimitPerIndex": job.kubernetes.replace,
        "maxFailedIndexes": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": [evicted, {"action": "FailJob", "onExitCodes": codes}]},
        "template": _pod(job),
    }


def _pod(job: JobFile) -> dict[str, Any]:
    where = job.kubernetes
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": where.grace_s,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(job)],
        "volumes": _volumes(job),
    }
    if where.service_account:
        spec["serviceAccountName"] = where.service_account
    if where.priority_class:
        spec["priorityClassName"] = where.priority_class
    if where.node_selector:
        spec["nodeSelector"] = dict(where.node_selector)
    if where.tolerations:
        spec["tolerations"] = [dict(each) for each in where.tolerations]
    if where.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in where.image_pull_secrets]
    labels = {"app.kubernetes.io/name": job.name, "ddp-launch/role": "worker"}
    return {"metadata": {"labels": labels}, "spec": spec}


def _container(job: JobFile) -> dict[str, Any]:
    wanted = {"cpu": job.resources.cpu, "memory": job.resources.memory}
    if job.resources.gpus:
        wanted[job.resources.gpu_resource] = str(job.resources.gpus)
    return {
        "name": _CONTAINER,
        "image": job.image,
        "command": ["ddp-launch"],
        "args": _arguments(job),
        "env": _environment(job),
        "resources": {"requests": dict(wanted), "limits": dict(wanted)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": name, "mountPath": path, **({"readOnly": True} if read_only else {})}
            for name, path, read_only in _mounts(job)
        ],
    }


def _arguments(job: JobFile) -> list[str]:
    """The job's uid, not its name: one that is made anew under the same name is another job."""
    grace = max(1, job.kubernetes.grace_s - 2 * _STOPPING_S)
    meet_at = job.kubernetes.rendezvous or job.rendezvous
    return job.launch(
        *(("--rendezvous", meet_at) if meet_at else ()),
        *("--rdzv-id", f"{job.name}-$(JOB_UID)"),
        *("--checkpoint-grace", f"{grace}s", "--shutdown-timeout", f"{_STOPPING_S}s"),
    )


def _environment(job: JobFile) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": "JOB_UID", "valueFrom": {"fieldRef": {"fieldPath": _JOB_UID}}},
        {"name": "HOME", "value": "/tmp"},
    ]
    said: dict[str, str] = {}
    if job.kubernetes.token_secret:
        said["DDP_RENDEZVOUS_TOKEN_FILE"] = f"{_SECRETS}/token/token"
    if job.kubernetes.tls_secret:
        said["DDP_RENDEZVOUS_CA_FILE"] = f"{_SECRETS}/tls/ca.crt"
        said["DDP_RENDEZVOUS_CERT_FILE"] = f"{_SECRETS}/tls/tls.crt"
        said["DDP_RENDEZVOUS_KEY_FILE"] = f"{_SECRETS}/tls/tls.key"
    return found + [{"name": name, "value": value} for name, value in (said | job.env).items()]


def _mounts(job: JobFile) -> list[tuple[str, str, bool]]:
    found = [("tmp", "/tmp", False), ("shm", "/dev/shm", False)]
    if job.kubernetes.token_secret:
        found.append(("rendezvous-token", f"{_SECRETS}/token", True))
    if job.kubernetes.tls_secret:
        found.append(("rendezvous-tls", f"{_SECRETS}/tls", True))
    return found + [(f"volume-{i}", each.path, each.read_only) for i, each in enumerate(job.volumes)]


def _volumes(job: JobFile) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": job.resources.shm}},
    ]
    if job.kubernetes.token_secret:
        found.append(_secret("rendezvous-token", job.kubernetes.token_secret))
    if job.kubernetes.tls_secret:
        found.append(_secret("rendezvous-tls", job.kubernetes.tls_secret))
    return found + [_volume(f"volume-{i}", each) for i, each in enumerate(job.volumes)]


def _secret(name: str, secret: str) -> dict[str, Any]:
    return {"name": name, "secret": {"secretName": secret, "defaultMode": 0o440}}


def _volume(name: str, volume: Volume) -> dict[str, Any]:
    if not volume.claim:
        return {"name": name, "emptyDir": {"sizeLimit": volume.size}}
    claim: dict[str, Any] = {"claimName": volume.claim}
    if volume.read_only:
        claim["readOnly"] = True
    return {"name": name, "persistentVolumeClaim": claim}
