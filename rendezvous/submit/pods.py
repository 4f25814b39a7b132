"""The pods of a job: one per machine, running `ddp-launch`. Pure. The same for every kind of Kubernetes job."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rendezvous.submit.job import JobFile, Volume

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
