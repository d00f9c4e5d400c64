"""docs/kuberay.yaml: its fields exist and have the right type, its parts fit together, its commands can be parsed.

The tables are written from the Go types of KubeRay (ray-operator/apis/ray/v1/raycluster_types.go, all that 1.5.1 has in
common with later ones) and the OpenAPI models of Kubernetes 1.37, of which they hold what the manifest may use. Whether
a cluster does what the manifest asks for is not tested anywhere.
"""

import copy
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.cli import _parse
from shared.config import Config
from shared.config_file import load_config

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = ROOT / "docs" / "kuberay.yaml"


class Quantity(str):
    """A number of bytes or cores as Kubernetes writes it."""


# A field's kind: a type, the name of a table, [kind] for a list, {"": kind} for a map, a tuple of the values allowed.
# "!" marks what must be there.
Kind = Any
_STRINGS = {"": str}
_RESOURCES = {"limits": {"": Quantity}, "requests": {"": Quantity}}

TABLES: dict[str, dict[str, Kind]] = {
    "RayCluster": {"apiVersion!": ("ray.io/v1",), "kind!": str, "metadata!": "ObjectMeta", "spec!": "RayClusterSpec"},
    "RayClusterSpec": {
        "authOptions": "AuthOptions",
        "autoscalerOptions": dict,
        "enableInTreeAutoscaling": bool,
        "gcsFaultToleranceOptions": dict,
        "headGroupSpec!": "HeadGroupSpec",
        "headServiceAnnotations": _STRINGS,
        "managedBy": ("ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue"),
        "rayVersion": str,
        "suspend": bool,
        "upgradeStrategy": dict,
        "workerGroupSpecs": ["WorkerGroupSpec"],
    },
    "AuthOptions": {"mode": ("disabled", "token")},
    "HeadGroupSpec": {
        "enableIngress": bool,
        "headService": dict,
        "labels": _STRINGS,
        "rayStartParams!": _STRINGS,  # optional since 1.5, required before
        "resources": _STRINGS,
        "serviceType": ("ClusterIP", "NodePort", "LoadBalancer", "ExternalName"),
        "template!": "PodTemplateSpec",
    },
    "WorkerGroupSpec": {
        "groupName!": str,
        "idleTimeoutSeconds": int,
        "labels": _STRINGS,
        "maxReplicas!": int,
        "minReplicas!": int,
        "numOfHosts": int,
        "rayStartParams!": _STRINGS,
        "replicas": int,
        "resources": _STRINGS,
        "scaleStrategy": dict,
        "suspend": bool,
        "template!": "PodTemplateSpec",
    },
    "Job": {"apiVersion!": ("batch/v1",), "kind!": str, "metadata!": "ObjectMeta", "spec!": "JobSpec"},
    "JobSpec": {
        "backoffLimit": int,
        "completionMode": ("NonIndexed", "Indexed"),
        "completions": int,
        "parallelism": int,
        "podFailurePolicy": "PodFailurePolicy",
        "podReplacementPolicy": ("Failed", "TerminatingOrFailed"),
        "template!": "PodTemplateSpec",
    },
    "PodFailurePolicy": {"rules!": ["PodFailurePolicyRule"]},
    "PodFailurePolicyRule": {
        "action!": ("Count", "FailIndex", "FailJob", "Ignore"),
        "onExitCodes": "OnExitCodes",
        "onPodConditions": ["OnPodConditions"],
    },
    "OnExitCodes": {"containerName": str, "operator!": ("In", "NotIn"), "values!": [int]},
    "OnPodConditions": {"status": ("True", "False", "Unknown"), "type!": str},
    "ConfigMap": {"apiVersion!": ("v1",), "kind!": str, "metadata!": "ObjectMeta", "data": _STRINGS},
    "PersistentVolumeClaim": {
        "apiVersion!": ("v1",),
        "kind!": str,
        "metadata!": "ObjectMeta",
        "spec!": "PersistentVolumeClaimSpec",
    },
    "PersistentVolumeClaimSpec": {
        "accessModes": [("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod")],
        "resources": "Resources",
        "storageClassName": str,
    },
    "NetworkPolicy": {
        "apiVersion!": ("networking.k8s.io/v1",),
        "kind!": str,
        "metadata!": "ObjectMeta",
        "spec!": "NetworkPolicySpec",
    },
    "NetworkPolicySpec": {
        "ingress": ["NetworkPolicyIngressRule"],
        "podSelector": "LabelSelector",
        "policyTypes": [("Ingress", "Egress")],
    },
    "NetworkPolicyIngressRule": {"from": ["NetworkPolicyPeer"]},
    "NetworkPolicyPeer": {"namespaceSelector": "LabelSelector", "podSelector": "LabelSelector"},
    "LabelSelector": {"matchLabels": _STRINGS},
    "ObjectMeta": {"annotations": _STRINGS, "labels": _STRINGS, "name": str, "namespace": str},
    "PodTemplateSpec": {"metadata": "ObjectMeta", "spec": "PodSpec"},
    "PodSpec": {
        "automountServiceAccountToken": bool,
        "containers!": ["Container"],
        "nodeSelector": _STRINGS,
        "restartPolicy": ("Always", "OnFailure", "Never"),
        "terminationGracePeriodSeconds": int,
        "tolerations": [dict],
        "volumes": ["Volume"],
    },
    "Container": {
        "args": [str],
        "command": [str],
        "env": ["EnvVar"],
        "image": str,
        "livenessProbe": "Probe",
        "name!": str,
        "ports": ["ContainerPort"],
        "readinessProbe": "Probe",
        "resources": "Resources",
        "securityContext": "SecurityContext",
        "volumeMounts": ["VolumeMount"],
    },
    "ContainerPort": {"containerPort!": int, "name": str},
    "EnvVar": {"name!": str, "value": str, "valueFrom": "EnvVarSource"},
    "EnvVarSource": {"secretKeyRef": "SecretKeySelector"},
    "SecretKeySelector": {"key!": str, "name": str},
    "Probe": {"failureThreshold": int, "periodSeconds": int, "tcpSocket": "TcpSocketAction"},
    "TcpSocketAction": {"port!": int},
    "Resources": _RESOURCES,
    "SecurityContext": {"allowPrivilegeEscalation": bool},
    "VolumeMount": {"mountPath!": str, "name!": str, "readOnly": bool},
    "Volume": {
        "configMap": "ConfigMapVolumeSource",
        "emptyDir": "EmptyDirVolumeSource",
        "name!": str,
        "persistentVolumeClaim": "ClaimVolumeSource",
    },
    "ConfigMapVolumeSource": {"name": str},
    "EmptyDirVolumeSource": {"medium": ("", "Memory"), "sizeLimit": Quantity},
    "ClaimVolumeSource": {"claimName!": str, "readOnly": bool},
}


def problems(value: Any, kind: Kind, path: str) -> Iterator[str]:
    """What is wrong with `value`, each with its path."""
    if isinstance(kind, str):
        yield from _table_problems(value, TABLES[kind], path)
    elif isinstance(kind, list):
        if not isinstance(value, list):
            yield f"{path}: {value!r} is not a list"
            return
        for index, item in enumerate(value):
            yield from problems(item, kind[0], f"{path}[{index}]")
    elif isinstance(kind, dict):
        for key, item in value.items() if isinstance(value, dict) else [("", value)]:
            yield from problems(item, kind[""], f"{path}.{key}")
    elif isinstance(kind, tuple):
        if value not in kind:
            yield f"{path}: {value!r} is not one of {kind}"
    elif kind is Quantity:
        if not (isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?(m|[KMGT]i?)?", value)):
            yield f"{path}: {value!r} is not a quantity"
    elif type(value) is not kind:
        yield f"{path}: {value!r} is not {kind.__name__}"


def _table_problems(value: Any, table: dict[str, Kind], path: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{path}: {value!r} is not an object"
        return
    kinds = {name.rstrip("!"): kind for name, kind in table.items()}
    yield from (f"{path}: no {name[:-1]}" for name in table if name.endswith("!") and name[:-1] not in value)
    for name, item in value.items():
        if name not in kinds:
            yield f"{path}: no field {name!r}; there are {sorted(kinds)}"
        else:
            yield from problems(item, kinds[name], f"{path}.{name}")


def load() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8")))


def all_problems(documents: list[dict[str, Any]]) -> list[str]:
    return [text for document in documents for text in problems(document, document["kind"], document["kind"])]


DOCUMENTS = load()
CLUSTER = next(document for document in DOCUMENTS if document["kind"] == "RayCluster")
HEAD = CLUSTER["spec"]["headGroupSpec"]
JOBS = {document["metadata"]["name"]: document for document in DOCUMENTS if document["kind"] == "Job"}
TEMPLATES = [HEAD["template"], *(job["spec"]["template"] for job in JOBS.values())]
NAMES = ["head", *JOBS]


def only_container(template: dict[str, Any]) -> dict[str, Any]:
    (container,) = template["spec"]["containers"]
    return container


def script(job: dict[str, Any]) -> str:
    """The job's shell script with the variables that the pod would set filled in."""
    container = only_container(job["spec"]["template"])
    text = container["args"][0]
    for variable in container["env"]:
        text = text.replace(f"${variable['name']}", variable.get("value", ""))
    return text


def words_after(job: dict[str, Any], command: str) -> list[str]:
    """The arguments that the script gives to `command`."""
    (line,) = re.findall(rf"{command} ([^;\n]*)", script(job))
    return shlex.split(line)


def service_arguments(job: dict[str, Any], resume: str = "") -> list[str]:
    return [word for word in words_after(job, "exec seqrelay") if word != "$resume"] + resume.split()


def start_options(template: dict[str, Any]) -> dict[str, str]:
    """What `ray start` is given in this pod, by option."""
    if template is HEAD["template"]:
        return dict(HEAD["rayStartParams"])
    job = next(job for job in JOBS.values() if job["spec"]["template"] is template)
    return dict(word.removeprefix("--").split("=", 1) for word in words_after(job, "until ray start"))


def num_bytes(quantity: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([KMGT]i)?", quantity).groups()  # type: ignore[union-attr]
    return int(number) << {None: 0, "Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40}[unit]


def run_config(tmp_path: Path) -> Config:
    (config_map,) = [document for document in DOCUMENTS if document["kind"] == "ConfigMap"]
    path = tmp_path / "run.toml"
    path.write_text(config_map["data"]["run.toml"])
    return load_config(path, [])


def test_every_field_exists_and_has_its_type() -> None:
    assert all_problems(DOCUMENTS) == []
    assert sorted(document["kind"] for document in DOCUMENTS) == [
        "ConfigMap", "Job", "Job", "NetworkPolicy", "PersistentVolumeClaim", "RayCluster",
    ]  # fmt: skip


def _worker_group(**changes: Any) -> dict[str, Any]:
    group = {"groupName": "g", "minReplicas": 0, "maxReplicas": 2, "rayStartParams": {}, "template": HEAD["template"]}
    return group | changes


def _job(documents: list[dict[str, Any]]) -> dict[str, Any]:
    return next(document for document in documents if document["kind"] == "Job")["spec"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda d: d[0]["spec"].update(rayversion="2.60.0"), "no field 'rayversion'"),
        (lambda d: d[0]["spec"]["authOptions"].update(mode="tokens"), "'tokens' is not one of"),
        (lambda d: d[0]["spec"].pop("headGroupSpec"), "no headGroupSpec"),
        (lambda d: d[0]["spec"]["headGroupSpec"]["rayStartParams"].update({"num-cpus": 0}), "0 is not str"),
        (lambda d: d[0]["spec"].update(workerGroupSpecs=[_worker_group(replicas="2")]), "'2' is not int"),
        (lambda d: d[0]["spec"].update(workerGroupSpecs=[_worker_group(minReplica=0)]), "no field 'minReplica'"),
        (lambda d: _job(d)["template"]["spec"].update(terminationGracePeriod=9), "'terminationGracePeriod'"),
        (lambda d: _job(d)["template"]["spec"]["volumes"][0]["emptyDir"].update(sizeLimit="1 GB"), "not a quantity"),
        (lambda d: _job(d)["template"]["spec"]["containers"][0].update(command="bash"), "is not a list"),
    ],
)
def test_a_mistake_is_seen(change: Callable[[list[dict[str, Any]]], Any], complaint: str) -> None:
    documents = copy.deepcopy(DOCUMENTS)
    change(documents)
    (problem,) = all_problems(documents)
    assert complaint in problem


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own
@pytest.mark.parametrize("template", TEMPLATES, ids=NAMES)
def test_ray_start_knows_its_options(template: dict[str, Any]) -> None:
    from ray.scripts.scripts import start

    known = {name for parameter in start.params for name in parameter.opts}
    assert {f"--{option}" for option in start_options(template)} <= known


@pytest.mark.parametrize("template", TEMPLATES, ids=NAMES)
def test_shared_memory_holds_the_object_store_and_memory_holds_both(template: dict[str, Any]) -> None:
    (mount,) = [m for m in only_container(template)["volumeMounts"] if m["mountPath"] == "/dev/shm"]
    (volume,) = [v for v in template["spec"]["volumes"] if v["name"] == mount["name"]]
    assert volume["emptyDir"]["medium"] == "Memory"
    size = num_bytes(volume["emptyDir"]["sizeLimit"])
    assert size > int(start_options(template)["object-store-memory"])
    assert num_bytes(only_container(template)["resources"]["limits"]["memory"]) > size


@pytest.mark.parametrize("template", TEMPLATES, ids=NAMES)
def test_every_pod_is_behind_the_policy_and_reaches_its_volumes(template: dict[str, Any]) -> None:
    (policy,) = [document["spec"] for document in DOCUMENTS if document["kind"] == "NetworkPolicy"]
    wanted = policy["podSelector"]
    assert policy["ingress"] == [{"from": [{"podSelector": wanted}]}]
    assert wanted["matchLabels"].items() <= template["metadata"]["labels"].items()
    volumes = template["spec"]["volumes"]
    assert {m["name"] for m in only_container(template)["volumeMounts"]} == {v["name"] for v in volumes}
    named = {document["metadata"]["name"] for document in DOCUMENTS} | {"models"}  # a claim of the team's own
    sources = [
        v.get("configMap", {}).get("name") or v.get("persistentVolumeClaim", {}).get("claimName") for v in volumes
    ]
    assert {source for source in sources if source} <= named


def test_everyone_needs_the_token_and_nobody_serves_a_dashboard() -> None:
    name = CLUSTER["metadata"]["name"]
    assert CLUSTER["spec"]["authOptions"] == {"mode": "token"}
    assert HEAD["rayStartParams"]["include-dashboard"] == "false"
    for job in JOBS.values():
        env = {v["name"]: v for v in only_container(job["spec"]["template"])["env"]}
        assert env["RAY_AUTH_MODE"]["value"] == "token"
        assert env["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": name, "key": "auth_token"}
        assert env["HEAD_ADDRESS"]["value"] == f"{name}-head-svc:6379"


def test_all_pods_run_the_same_image_and_the_ray_of_this_project() -> None:
    assert len({only_container(template)["image"] for template in TEMPLATES}) == 1
    pins = (ROOT / "requirements" / "cpu.txt").read_text()
    assert f"\nray=={CLUSTER['spec']['rayVersion']}\n" in pins


def test_numbers_that_must_agree(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    rollout = JOBS["seqrelay-rollout"]["spec"]
    assert rollout["completions"] == rollout["parallelism"]
    assert rollout["template"]["spec"]["terminationGracePeriodSeconds"] >= config.rollout.group_timeout_s
    ledger = f"{config.run.directory}/{config.run.name}/ledger.sqlite"
    assert f"[ -e {ledger} ]" in script(JOBS["seqrelay-learner"])


@pytest.mark.parametrize("resume", ["", "--resume"])
def test_the_command_line_takes_the_commands(resume: str) -> None:
    head = f"{CLUSTER['metadata']['name']}-head-svc:6379"
    learner = _parse(service_arguments(JOBS["seqrelay-learner"], resume))
    assert (learner.command, learner.address, learner.resume) == ("learner", head, bool(resume))
    rollout = _parse(service_arguments(JOBS["seqrelay-rollout"]))
    assert (rollout.command, rollout.address, rollout.workers, rollout.overrides) == ("rollout", head, 1, [])
    assert learner.config == rollout.config == Path("/etc/seqrelay/run.toml")
    (shown,) = re.findall(r"seqrelay (status [^']*)'", MANIFEST.read_text())
    assert _parse(shown.split()).command == "status"


def test_the_service_is_the_process_that_gets_the_signal() -> None:
    for job in JOBS.values():
        assert only_container(job["spec"]["template"])["command"] == ["/bin/bash", "-ec"]
        assert script(job).strip().splitlines()[-1].startswith("exec seqrelay ")
