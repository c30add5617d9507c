"""The manifests of a fleet fit Kubernetes' own schemas, and refer to what is there."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from support.kustomize import patched

from multilora_engine.config import EngineConfig
from multilora_engine.serving import metrics

KUBERNETES = Path(__file__).parents[2] / "docker" / "kubernetes"
FLEET, GATEWAY = KUBERNETES / "fleet", KUBERNETES / "gateway"
RESIDENCY = KUBERNETES / "gateway_residency"

Manifest = dict[str, Any]


def read(path: Path) -> list[Manifest]:
    return list(yaml.safe_load_all(path.read_text()))


def manifests(folder: Path) -> Iterator[Manifest]:
    (kustomization,) = read(folder / "kustomization.yaml")
    for name in kustomization["resources"]:
        yield from read(folder / name)


ALL = [*manifests(FLEET), *manifests(GATEWAY)]
OWN_SCHEMAS = [document for document in ALL if document["kind"] != "InferencePool"]
DEPLOYMENTS = [document for document in ALL if document["kind"] == "Deployment"]


def title(document: Manifest) -> str:
    return f"{document['kind']}-{document['metadata']['name']}"


def named(kind: str, name: str) -> Manifest:
    return next(one for one in ALL if one["kind"] == kind and one["metadata"]["name"] == name)


def pod(deployment: Manifest) -> Manifest:
    spec: Manifest = deployment["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize("document", OWN_SCHEMAS, ids=title)
def test_a_manifest_fits_kubernetes_schema(document: Manifest) -> None:
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_the_pool_has_the_fields_of_the_published_v1_and_leads_to_the_picker_and_the_pods() -> None:
    """kubernetes-validate has no schemas of custom resources: these are the fields of the API's reference."""
    (pool,) = [document for document in ALL if document["kind"] == "InferencePool"]
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    spec = pool["spec"]
    assert set(spec) == {"selector", "targetPorts", "endpointPickerRef"}
    assert set(spec["selector"]) == {"matchLabels"}
    assert set(spec["endpointPickerRef"]) == {"name", "port", "failureMode"}
    labels = named("Deployment", "pool")["spec"]["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    (target,) = spec["targetPorts"]
    ports = {p["name"]: p["containerPort"] for c in pod(named("Deployment", "pool"))["containers"] for p in c["ports"]}
    assert target == {"number": ports["http"]}
    picker = named("Service", spec["endpointPickerRef"]["name"])
    assert spec["endpointPickerRef"]["port"]["number"] in [port["port"] for port in picker["spec"]["ports"]]
    (container,) = pod(named("Deployment", "picker"))["containers"]
    assert f"--model-server-metrics-port={ports['system']}" in container["args"]
    assert f"--pool-name={pool['metadata']['name']}" in container["args"]


@pytest.mark.parametrize(
    ("folder", "scorer", "read"),
    [
        (GATEWAY, "lora-affinity-scorer", set()),
        (
            RESIDENCY,
            "lora-load-state-scorer",
            {
                "multilora_lora_adapter_loaded",
                "multilora_num_gpu_loaded_lora_adapters",
                "multilora_max_gpu_lora_adapters",
            },
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else "",
)
def test_the_picker_reads_metrics_that_there_are(folder: Path, scorer: str, read: set[str]) -> None:
    (config,) = read_config(folder)
    plugins = {plugin["type"]: plugin.get("parameters", {}) for plugin in config["plugins"]}
    (engine,) = plugins["core-metrics-extractor"]["engineConfigs"]
    labels = named("Deployment", "pool")["spec"]["template"]["metadata"]["labels"]
    assert labels["llm-d.ai/engine-type"] == engine.pop("name")
    known = {value.name for value in vars(metrics).values() if isinstance(value, metrics.MetricName)}
    assert read | {"multilora_lora_requests_info"} <= set(engine.values()) <= known
    scored = [entry["pluginRef"] for profile in config["schedulingProfiles"] for entry in profile["plugins"]]
    assert set(scored) <= set(plugins)
    assert scorer in scored


def read_config(folder: Path) -> list[Manifest]:
    return read(folder / "picker_config.yaml")


def test_the_gateway_that_reads_residency_is_the_other_one_with_its_own_configuration() -> None:
    (overlay,) = read(RESIDENCY / "kustomization.yaml")
    assert overlay["resources"] == ["../gateway"]
    (generated,) = overlay["configMapGenerator"]
    (replaced,) = read(GATEWAY / "kustomization.yaml")[0]["configMapGenerator"]
    assert generated == {**replaced, "behavior": "replace"}
    assert {path.name for path in RESIDENCY.iterdir()} == {"kustomization.yaml", *generated["files"]}


@pytest.mark.parametrize("folder", [FLEET, GATEWAY], ids=lambda folder: folder.name)
def test_every_file_is_used_and_every_image_named(folder: Path) -> None:
    (kustomization,) = read(folder / "kustomization.yaml")
    generated = [name for one in kustomization["configMapGenerator"] for name in one.get("files", [])]
    used = {"kustomization.yaml", *kustomization["resources"], *generated}
    assert {path.name for path in folder.iterdir()} == used
    images = {c["image"] for one in manifests(folder) if one["kind"] == "Deployment" for c in pod(one)["containers"]}
    assert images == {image["name"] for image in kustomization["images"]}


@pytest.mark.parametrize("folder", [FLEET, GATEWAY], ids=lambda folder: folder.name)
def test_a_folder_applies_alone(folder: Path) -> None:
    """Its namespace, and the claims, the accounts and the configuration of its pods are in it."""
    (kustomization,) = read(folder / "kustomization.yaml")
    there = {(one["kind"], one["metadata"]["name"]) for one in manifests(folder)}
    there |= {("ConfigMap", one["name"]) for one in kustomization["configMapGenerator"]}
    assert {name for kind, name in there if kind == "Namespace"} == {kustomization["namespace"]}
    used = set()
    for spec in (pod(one) for one in manifests(folder) if one["kind"] == "Deployment"):
        if "serviceAccountName" in spec:
            used.add(("ServiceAccount", spec["serviceAccountName"]))
        for volume in spec["volumes"]:
            if "persistentVolumeClaim" in volume:
                used.add(("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]))
            if "configMap" in volume:
                used.add(("ConfigMap", volume["configMap"]["name"]))
    assert used, "pods have volumes"
    assert used <= there


def test_the_fleet_and_the_gateway_share_no_namespace_and_the_picker_looks_into_its_own() -> None:
    """A policy for all pods of one, and the removal of one with its namespace, would be for the other, too."""
    fleet, gateway, residency = (
        read(folder / "kustomization.yaml")[0]["namespace"] for folder in (FLEET, GATEWAY, RESIDENCY)
    )
    assert fleet != gateway == residency
    (container,) = pod(named("Deployment", "picker"))["containers"]
    assert f"--pool-namespace={gateway}" in container["args"]


GATEWAYS = {"namespace": {"multilora-gateway": "true"}, "pod": {}}
MONITORING = {"namespace": {"kubernetes.io/metadata.name": "monitoring"}, "pod": {}}
NAMES = {"namespace": {"kubernetes.io/metadata.name": "kube-system"}, "pod": {}}
CLIENT = {"namespace": {}, "pod": {"multilora-client": "true"}}
STRANGER = {"namespace": {}, "pod": {}}


def own(name: str) -> Manifest:
    """A pod of the same namespace, by its deployment."""
    return {"namespace": None, "pod": named("Deployment", name)["spec"]["template"]["metadata"]["labels"]}


def selects(selector: Manifest, labels: Manifest) -> bool:
    expressions = selector.get("matchExpressions", [])
    assert all(rule["operator"] == "In" for rule in expressions)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(rule["key"]) in rule["values"] for rule in expressions
    )


def is_peer(rule: Manifest, peer: Manifest) -> bool:
    if "namespaceSelector" in rule:
        is_there = peer["namespace"] is not None and selects(rule["namespaceSelector"], peer["namespace"])
    else:
        is_there = peer["namespace"] is None
    return is_there and selects(rule.get("podSelector", {}), peer["pod"])


def is_allowed(folder: Path, direction: str, name: str, peer: Manifest | None, *ports: int | str) -> bool:
    """Whether the policies let a pod be called (`ingress`) or call (`egress`). ports: one port's number and name.

    peer: None for an address that is no pod's.
    """
    policies = [
        one["spec"]
        for one in manifests(folder)
        if one["kind"] == "NetworkPolicy"
        and direction.capitalize() in one["spec"]["policyTypes"]
        and selects(one["spec"]["podSelector"], own(name)["pod"])
    ]
    assert policies, f"nothing is said of {direction} of {name}"
    sides = {"ingress": "from", "egress": "to"}
    return any(
        (sides[direction] not in rule or any(peer is not None and is_peer(one, peer) for one in rule[sides[direction]]))
        and ("ports" not in rule or any(port["port"] in ports for port in rule["ports"]))
        for policy in policies
        for rule in policy.get(direction, [])
    )


@pytest.mark.parametrize(
    ("folder", "direction", "name", "peer", "ports", "expected"),
    [
        (GATEWAY, "ingress", "pool", GATEWAYS, (8000, "http"), True),
        (GATEWAY, "ingress", "picker", GATEWAYS, (9002, "grpc"), True),
        (GATEWAY, "ingress", "pool", own("picker"), (9090, "system"), True),
        (GATEWAY, "egress", "picker", own("pool"), (9090, "system"), True),
        (GATEWAY, "egress", "picker", None, (443,), True),
        (GATEWAY, "egress", "picker", None, (6443,), True),
        (GATEWAY, "egress", "picker", NAMES, (53,), True),
        (GATEWAY, "ingress", "pool", MONITORING, (9090, "system"), True),
        (GATEWAY, "ingress", "picker", MONITORING, (9090, "metrics"), True),
        (GATEWAY, "ingress", "pool", STRANGER, (8000, "http"), False),
        (GATEWAY, "ingress", "pool", GATEWAYS, (9090, "system"), False),
        (GATEWAY, "ingress", "picker", STRANGER, (9002, "grpc"), False),
        (GATEWAY, "egress", "pool", None, (443,), False),
        (GATEWAY, "egress", "picker", None, (80,), False),
        (FLEET, "ingress", "front", CLIENT, (8001, "grpc"), True),
        (FLEET, "ingress", "worker", own("front"), (40000,), True),
        (FLEET, "egress", "front", own("worker"), (40000,), True),
        (FLEET, "ingress", "front", STRANGER, (8001, "grpc"), False),
        (FLEET, "ingress", "worker", CLIENT, (40000,), False),
        (FLEET, "egress", "worker", None, (443,), False),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else None,
)
def test_policies_let_through_what_has_to_pass_and_nothing_else(
    folder: Path, direction: str, name: str, peer: Manifest | None, ports: tuple[int | str, ...], expected: bool
) -> None:
    assert is_allowed(folder, direction, name, peer, *ports) == expected


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=title)
def test_a_pod_is_restricted_and_has_what_it_mounts_and_reads(deployment: Manifest) -> None:
    spec, name = pod(deployment), deployment["metadata"]["name"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert (
        deployment["spec"]["selector"]["matchLabels"].items()
        <= deployment["spec"]["template"]["metadata"]["labels"].items()
    )
    mounts = {mount["name"] for container in spec["containers"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in spec["volumes"]}
    generated = {
        one["name"]
        for folder in (FLEET, GATEWAY)
        for one in read(folder / "kustomization.yaml")[0]["configMapGenerator"]
    }
    for container in spec["containers"]:
        security = container["securityContext"]
        assert (security["readOnlyRootFilesystem"], security["allowPrivilegeEscalation"]) == (True, False), name
        assert {source["configMapRef"]["name"] for source in container.get("envFrom", [])} <= generated
        ports = {port["name"] for port in container["ports"]}
        probes = [container[key] for key in ("startupProbe", "readinessProbe", "livenessProbe") if key in container]
        assert {probe["httpGet"]["port"] for probe in probes if "httpGet" in probe} <= ports
        # A process that others call says an address of the pod's, or the loopback where they are in the same pod.
        values = {entry["name"]: entry.get("value", "") for entry in container.get("env", [])}
        hosts = {value for key, value in values.items() if key in ("DYN_TCP_RPC_HOST", "DYN_EVENT_PLANE_HOST")}
        assert hosts <= {"$(POD_IP)"} or hosts == {"127.0.0.1"}


@pytest.mark.parametrize("name", ["worker", "pool"])
def test_a_worker_is_ready_when_the_endpoint_that_generates_is(name: str) -> None:
    """Dynamo's own page of health is green before that endpoint is registered, unless it is told to wait for it."""
    worker = next(one for one in pod(named("Deployment", name))["containers"] if one["command"] == ["multilora-dynamo"])
    assert {worker[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe")} == {"/health"}
    assert not any(argument.startswith("--endpoint") for argument in worker["args"]), "Dynamo's name for it is generate"
    (waited_for,) = [e["value"] for e in worker["env"] if e["name"] == "DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS"]
    assert json.loads(waited_for) == ["generate"]


@pytest.mark.parametrize("kind", ["Service", "PodDisruptionBudget", "HorizontalPodAutoscaler", "NetworkPolicy"])
def test_what_selects_finds_its_pods(kind: str) -> None:
    labels = [one["spec"]["template"]["metadata"]["labels"] for one in DEPLOYMENTS]
    names = {one["metadata"]["name"] for one in DEPLOYMENTS}
    for one in (one for one in ALL if one["kind"] == kind):
        spec = one["spec"]
        match kind:
            case "Service":
                found = [each for each in labels if spec["selector"].items() <= each.items()]
                assert len(found) == 1, one["metadata"]["name"]
            case "PodDisruptionBudget":
                assert any(spec["selector"]["matchLabels"].items() <= each.items() for each in labels)
            case "HorizontalPodAutoscaler":
                assert spec["scaleTargetRef"]["name"] in names
            case _:
                for rule in spec["podSelector"].get("matchExpressions", []):
                    assert set(rule["values"]) <= names
                if matched := spec["podSelector"].get("matchLabels"):
                    assert any(matched.items() <= each.items() for each in labels)


def test_arguments_are_parameters_of_the_engine() -> None:
    known = {*EngineConfig.model_fields, *type(EngineConfig.model_fields["lora"].default).model_fields}
    arguments = [a for one in DEPLOYMENTS for c in pod(one)["containers"] for a in c.get("args", [])]
    named_ones = re.findall(r"--set=(\w+)=", "\n".join(arguments))
    assert set(named_ones) <= known
    assert "engine" in named_ones


def test_the_gpu_overlay_gives_workers_a_gpu_that_must_serve_and_a_place_for_compiled_kernels() -> None:
    (overlay,) = read(KUBERNETES / "fleet_gpu" / "kustomization.yaml")
    deployment = patched(named("Deployment", "worker"), overlay)
    kubernetes_validate.validate(deployment, kubernetes_validate.latest_version(), strict=True)
    (worker,), (plain,) = pod(deployment)["containers"], pod(named("Deployment", "worker"))["containers"]
    assert worker["resources"]["limits"] == {**plain["resources"]["limits"], "nvidia.com/gpu": 1}
    assert worker["args"] == [*plain["args"], "--set=device=cuda"]
    assert worker["env"] == [*plain["env"], {"name": "TRITON_CACHE_DIR", "value": "/compiled"}]
    assert worker["volumeMounts"] == [*plain["volumeMounts"], {"name": "compiled", "mountPath": "/compiled"}]
    assert [volume["name"] for volume in pod(deployment)["volumes"]][-1] == "compiled"
