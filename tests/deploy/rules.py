"""What the schemas of Kubernetes let pass and the API server, or the night shift, would not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Object = dict[str, Any]

KNOWN = {
    *("Namespace", "ServiceAccount", "Service", "StatefulSet", "Deployment", "CronJob", "Job", "Secret"),
    *("ConfigMap", "NetworkPolicy", "PodDisruptionBudget", "PersistentVolumeClaim", "Pod"),
    *(
        "Certificate",
        "Issuer",
        "ClusterIssuer",
        "ServiceMonitor",
        "PodMonitor",
        "PrometheusRule",
        "PriorityClass",
    ),
    *("JobSet", "TrainJob", "TrainingRuntime"),
}
_UNITS = {
    "m": 1e-3,
    "": 1.0,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
# Made by others: what an administrator or cert-manager puts into the namespace.
_GIVEN_SECRETS = {"ddp-rendezvous-token-keys"}
_RESTRICTED_VOLUMES = {
    *(
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    ),
}


def name_of(found: Object) -> str:
    return f"{found['kind']}/{found['metadata']['name']}"


def pods(objects: Sequence[Object]) -> Iterator[tuple[str, Object, Object]]:
    """(whose, the template's metadata and spec, the spec of what makes them)."""
    for found in objects:
        spec = found.get("spec", {})
        match found["kind"]:
            case "StatefulSet" | "Deployment" | "Job":
                yield name_of(found), spec["template"], spec
            case "CronJob":
                yield name_of(found), spec["jobTemplate"]["spec"]["template"], spec["jobTemplate"]["spec"]
            case "JobSet":
                for each in spec["replicatedJobs"]:
                    yield name_of(found), each["template"]["spec"]["template"], each["template"]["spec"]
            case "TrainingRuntime":
                for each in spec["template"]["spec"]["replicatedJobs"]:
                    yield name_of(found), each["template"]["spec"]["template"], each["template"]["spec"]


def containers(template: Object) -> list[Object]:
    spec = template["spec"]
    return [*spec.get("initContainers", []), *spec["containers"]]


def matches(selector: Object, labels: Object) -> bool:
    """An empty selector matches all."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for rule in selector.get("matchExpressions", []):
        if rule["operator"] == "In" and labels.get(rule["key"]) not in rule["values"]:
            return False
    return True


def quantity(text: str | int | float) -> float:
    words = str(text)
    number = words.rstrip("kKmMGTi")
    return float(number) * _UNITS[words[len(number) :]]


def kinds_are_known(objects: Sequence[Object]) -> Iterator[str]:
    for found in objects:
        if found["kind"] not in KNOWN:
            yield f"{name_of(found)}: nobody knows this kind"


def names_are_unique(objects: Sequence[Object]) -> Iterator[str]:
    names = [(name_of(found), found["metadata"].get("namespace")) for found in objects]
    yield from (f"{name}: twice" for name, where in set(names) if names.count((name, where)) > 1)


def selectors_find_somebody(objects: Sequence[Object]) -> Iterator[str]:
    labelled = [template["metadata"]["labels"] for _, template, _ in pods(objects)]
    by_controller = [
        {"batch.kubernetes.io/job-name": found["metadata"]["name"]}
        for found in objects
        if found["kind"] == "Job"
    ]
    services = [found["metadata"].get("labels", {}) for found in objects if found["kind"] == "Service"]
    for found in objects:
        spec = found.get("spec", {})
        match found["kind"]:
            case "Service" if "selector" in spec:
                selector, among = {"matchLabels": spec["selector"]}, labelled + by_controller
            case "PodDisruptionBudget" | "StatefulSet" | "Deployment" | "PodMonitor":
                selector, among = spec["selector"], labelled
            case "NetworkPolicy" if spec["podSelector"]:
                selector, among = spec["podSelector"], labelled
            case "ServiceMonitor":
                selector, among = spec["selector"], services
            case _:
                continue
        if not any(matches(selector, labels) for labels in among):
            yield f"{name_of(found)}: its selector finds nobody"


def sets_select_their_own(objects: Sequence[Object]) -> Iterator[str]:
    for found in objects:
        if found["kind"] in ("StatefulSet", "Deployment"):
            template = found["spec"]["template"]
            if not matches(found["spec"]["selector"], template["metadata"]["labels"]):
                yield f"{name_of(found)}: its selector does not match its own pods"


def services_reach_ports(objects: Sequence[Object]) -> Iterator[str]:
    for found in objects:
        if found["kind"] != "Service" or "selector" not in found["spec"]:
            continue
        for _, template, _ in pods(objects):
            if not matches({"matchLabels": found["spec"]["selector"]}, template["metadata"]["labels"]):
                continue
            named = {port["name"] for each in containers(template) for port in each.get("ports", [])}
            for port in found["spec"].get("ports", []):
                target = port.get("targetPort")
                if isinstance(target, str) and target not in named:
                    yield f"{name_of(found)}: its pods have no port {target}"


def sets_have_their_service(objects: Sequence[Object]) -> Iterator[str]:
    headless = {
        found["metadata"]["name"]
        for found in objects
        if found["kind"] == "Service" and found["spec"].get("clusterIP") == "None"
    }
    for found in objects:
        if found["kind"] == "StatefulSet" and found["spec"]["serviceName"] not in headless:
            yield f"{name_of(found)}: there is no headless service {found['spec']['serviceName']}"
        if found["kind"] == "Job" and "subdomain" in found["spec"]["template"]["spec"]:
            if found["spec"]["template"]["spec"]["subdomain"] not in headless:
                yield f"{name_of(found)}: its pods' subdomain is no headless service"


def mounts_have_volumes(objects: Sequence[Object]) -> Iterator[str]:
    for whose, template, spec in pods(objects):
        volumes = [each["name"] for each in template["spec"].get("volumes", [])]
        volumes += [each["metadata"]["name"] for each in spec.get("volumeClaimTemplates", [])]
        yield from (f"{whose}: volume {each} twice" for each in set(volumes) if volumes.count(each) > 1)
        mounted = set()
        for container in containers(template):
            paths = [each["mountPath"] for each in container.get("volumeMounts", [])]
            yield from (f"{whose}: two mounts at {each}" for each in set(paths) if paths.count(each) > 1)
            for mount in container.get("volumeMounts", []):
                mounted.add(mount["name"])
                if mount["name"] not in volumes:
                    yield f"{whose}: {mount['mountPath']} mounts {mount['name']}, which is no volume"
        yield from (f"{whose}: volume {each} is mounted nowhere" for each in volumes if each not in mounted)


def is_whole(objects: Sequence[Object]) -> bool:
    """The service and its namespace; of a job, much is its namespace's own."""
    return any(found["kind"] == "Namespace" for found in objects)


def secrets_exist(objects: Sequence[Object]) -> Iterator[str]:
    made = {
        found["spec"]["secretName"] if found["kind"] == "Certificate" else found["metadata"]["name"]
        for found in objects
        if found["kind"] in ("Certificate", "Secret")
    }
    if not is_whole(objects):
        return
    for whose, template, _ in pods(objects):
        for volume in template["spec"].get("volumes", []):
            secret = volume.get("secret", {}).get("secretName")
            if secret and secret not in made | _GIVEN_SECRETS:
                yield f"{whose}: nobody makes the secret {secret}"


def resources_are_bounded(objects: Sequence[Object]) -> Iterator[str]:
    for whose, template, _ in pods(objects):
        for container in containers(template):
            resources = container.get("resources", {})
            requests, limits = resources.get("requests", {}), resources.get("limits", {})
            for name in ("cpu", "memory"):
                if name not in requests or name not in limits:
                    yield f"{whose}: no request or no limit of {name}"
            for name in requests.keys() & limits.keys():
                if quantity(requests[name]) > quantity(limits[name]):
                    yield f"{whose}: requests more {name} than its limit"
            for name in limits:
                if "/" in name and requests.get(name) != limits[name]:
                    yield f"{whose}: {name} is requested as it is limited, or not at all"


def pods_are_confined(objects: Sequence[Object]) -> Iterator[str]:
    """The restricted standard, and a file system that nothing can be written to."""
    for whose, template, _ in pods(objects):
        spec = template["spec"]
        pod = spec.get("securityContext", {})
        if not pod.get("runAsNonRoot") or pod.get("runAsUser", 0) < 10000:
            yield f"{whose}: runs as root, or as a user that the node may have"
        if pod.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            yield f"{whose}: no seccomp profile"
        if spec.get("automountServiceAccountToken") is not False:
            yield f"{whose}: is given a token of the API"
        if spec.get("enableServiceLinks") is not False:
            yield f"{whose}: DDP_RENDEZVOUS_* of the service's links would be taken for settings"
        for forbidden in ("hostNetwork", "hostPID", "hostIPC"):
            if spec.get(forbidden):
                yield f"{whose}: {forbidden}"
        for volume in spec.get("volumes", []):
            yield from (
                f"{whose}: the restricted standard has no volume of {kind}"
                for kind in volume.keys() - {"name"} - _RESTRICTED_VOLUMES
            )
        for container in containers(template):
            own = container.get("securityContext", {})
            if own.get("privileged") or own.get("capabilities", {}).get("add"):
                yield f"{whose}: {container['name']} asks for privileges"
            if any("hostPort" in port for port in container.get("ports", [])):
                yield f"{whose}: {container['name']} takes a port of its node"
            confined = own.get("readOnlyRootFilesystem") and own.get("allowPrivilegeEscalation") is False
            if not confined or own.get("capabilities", {}).get("drop") != ["ALL"]:
                yield f"{whose}: {container['name']} can do more than it must"


def variables_expand(objects: Sequence[Object]) -> Iterator[str]:
    """$(NAME) stays as it is where NAME comes later, or never."""
    for whose, template, _ in pods(objects):
        for container in containers(template):
            known: set[str] = set()
            for variable in container.get("env", []):
                yield from _unknown(whose, str(variable.get("value", "")), known)
                if variable["name"] in known:
                    yield f"{whose}: {variable['name']} twice"
                known.add(variable["name"])
            for word in [*container.get("command", []), *container.get("args", [])]:
                yield from _unknown(whose, word, known)


def _unknown(whose: str, text: str, known: set[str]) -> Iterator[str]:
    for part in text.split("$(")[1:]:
        name = part.partition(")")[0]
        if name.isidentifier() and name not in known:
            yield f"{whose}: $({name}) is nowhere said before"


def probes_have_ports(objects: Sequence[Object]) -> Iterator[str]:
    for whose, template, _ in pods(objects):
        for container in containers(template):
            named = {port["name"] for port in container.get("ports", [])}
            for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
                port = container.get(kind, {}).get("httpGet", {}).get("port")
                if isinstance(port, str) and port not in named:
                    yield f"{whose}: {kind} asks port {port}, which there is not"
                yield from _grpc_probe(f"{whose}: {kind}", container, kind)


def _grpc_probe(which: str, container: Object, kind: str) -> Iterator[str]:
    """The kubelet speaks gRPC without TLS alone, and takes the number of a port alone."""
    probe = container.get(kind, {}).get("grpc")
    if probe is None:
        return
    if probe["port"] not in [port["containerPort"] for port in container.get("ports", [])]:
        yield f"{which} asks port {probe['port']}, which there is not"
    if any("TLS_CERT" in variable["name"] for variable in container.get("env", [])):
        yield f"{which} speaks plain gRPC to a TLS port"
    if "httpGet" in container[kind]:
        yield f"{which} asks in two ways"


def images_are_of_a_version(objects: Sequence[Object]) -> Iterator[str]:
    for whose, template, _ in pods(objects):
        for container in containers(template):
            name, at, _ = container["image"].partition("@sha256:")
            tag = name.rpartition("/")[2].partition(":")[2]
            if not at and tag in ("", "latest"):
                yield f"{whose}: {container['image']} may be another image tomorrow"


def priorities_exist(objects: Sequence[Object]) -> Iterator[str]:
    made = {found["metadata"]["name"] for found in objects if found["kind"] == "PriorityClass"}
    made |= {"system-cluster-critical", "system-node-critical"}
    for whose, template, _ in pods(objects) if is_whole(objects) else ():
        asked = template["spec"].get("priorityClassName")
        if asked and asked not in made:
            yield f"{whose}: nobody makes the priority class {asked}"


def claims_exist(objects: Sequence[Object]) -> Iterator[str]:
    made = {found["metadata"]["name"] for found in objects if found["kind"] == "PersistentVolumeClaim"}
    for whose, template, _ in pods(objects) if is_whole(objects) else ():
        for volume in template["spec"].get("volumes", []):
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            if claim and claim not in made:
                yield f"{whose}: nobody makes the claim {claim}"


def certificates_are_signed(objects: Sequence[Object]) -> Iterator[str]:
    authorities = {
        found["spec"]["secretName"]
        for found in objects
        if found["kind"] == "Certificate" and found["spec"].get("isCA")
    }
    issuers = {found["metadata"]["name"]: found for found in objects if found["kind"].endswith("Issuer")}
    for found in objects:
        if found["kind"] == "Issuer" and found["spec"].get("ca", {}).get("secretName") not in {
            None,
            *authorities,
        }:
            yield f"{name_of(found)}: its secret holds no CA"
        if found["kind"] == "Certificate":
            asked = found["spec"]["issuerRef"]
            if issuers.get(asked["name"], {}).get("kind") != asked["kind"]:
                yield f"{name_of(found)}: there is no {asked['kind']} {asked['name']}"


def certificates_name_services(objects: Sequence[Object]) -> Iterator[str]:
    services = {found["metadata"]["name"] for found in objects if found["kind"] == "Service"}
    for found in objects:
        if found["kind"] == "Certificate":
            for name in found["spec"].get("dnsNames", []):
                if ".svc" in name and name.removeprefix("*.").partition(".")[0] not in services:
                    yield f"{name_of(found)}: {name} is no service's"


def jobs_can_heal(objects: Sequence[Object]) -> Iterator[str]:
    for whose, template, spec in pods(objects):
        if "completionMode" not in spec:
            continue
        if spec["completionMode"] != "Indexed":
            yield f"{whose}: pods without an index have no name to be found under"
        if template["spec"].get("restartPolicy") != "Never":
            yield f"{whose}: a policy for failed pods needs restartPolicy Never"
        if spec["completions"] != spec["parallelism"]:
            yield f"{whose}: some pods would wait for others to end"
        if "backoffLimitPerIndex" in spec and "backoffLimit" in spec:
            yield f"{whose}: two limits for failed pods"
        names = {each["name"] for each in containers(template)}
        for rule in spec.get("podFailurePolicy", {}).get("rules", []):
            yield from _legal(whose, rule, names)
        if spec.get("podFailurePolicy") and spec.get("podReplacementPolicy", "Failed") != "Failed":
            yield f"{whose}: with a policy for failed pods they are replaced once they have failed, not before"


def _legal(whose: str, rule: Object, names: set[str]) -> Iterator[str]:
    codes = rule.get("onExitCodes")
    if codes:
        if codes.get("containerName") not in names:
            yield f"{whose}: a rule about {codes.get('containerName')}, which is no container"
        if codes["operator"] == "In" and 0 in codes["values"]:
            yield f"{whose}: exit code 0 is no failure"
        if codes["values"] != sorted(set(codes["values"])):
            yield f"{whose}: exit codes must be in order, each once"
    for condition in rule.get("onPodConditions", []):
        if condition.get("status") != "True":
            yield f"{whose}: a condition without its status"


def policies_name_real_ports(objects: Sequence[Object]) -> Iterator[str]:
    for found in objects:
        if found["kind"] != "NetworkPolicy":
            continue
        for _, template, _ in pods(objects):
            if not matches(found["spec"]["podSelector"], template["metadata"]["labels"]):
                continue
            named = {port["name"] for each in containers(template) for port in each.get("ports", [])}
            for entry in found["spec"].get("ingress", []):
                for port in entry.get("ports", []):
                    if isinstance(port["port"], str) and port["port"] not in named:
                        yield f"{name_of(found)}: lets in to port {port['port']}, which there is not"


def budgets_leave_a_way(objects: Sequence[Object]) -> Iterator[str]:
    """One that lets nobody go blocks the drain of a node for ever."""
    for found in objects:
        if found["kind"] == "PodDisruptionBudget":
            for whose, template, spec in pods(objects):
                if matches(found["spec"]["selector"], template["metadata"]["labels"]):
                    least = found["spec"].get("minAvailable", 0)
                    if found["spec"].get("maxUnavailable", 1) == 0 or least == spec.get("replicas", 1):
                        yield f"{name_of(found)}: no pod of {whose} may ever go"


RULES = (
    *(kinds_are_known, names_are_unique, selectors_find_somebody, sets_select_their_own),
    *(services_reach_ports, sets_have_their_service, mounts_have_volumes, secrets_exist),
    *(resources_are_bounded, pods_are_confined, variables_expand, probes_have_ports, jobs_can_heal),
    *(policies_name_real_ports, budgets_leave_a_way, images_are_of_a_version, priorities_exist, claims_exist),
    *(certificates_are_signed, certificates_name_services),
)


def broken(objects: Sequence[Object]) -> list[str]:
    return [words for rule in RULES for words in rule(objects)]
