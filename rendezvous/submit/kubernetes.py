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
from typing import TYPE_CHECKING, Any

from rendezvous.submit.pods import CONTAINER, REPLACED, arguments, template

if TYPE_CHECKING:
    from rendezvous.submit.job import JobFile

Object = dict[str, Any]


def objects(job: JobFile) -> list[Object]:
    """The objects to create; the last one is the job itself."""
    policy = [_network_policy(job)] if job.kubernetes.fenced else []
    match job.kubernetes.kind:
        case "job":
            return [_service(job), *policy, _job(job)]
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
