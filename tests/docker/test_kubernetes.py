"""The Kubernetes manifests fit Kubernetes' own schemas, and refer to what is there."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from support.kustomize import patched

KUBERNETES = Path(__file__).parents[2] / "docker" / "kubernetes"
BASE = KUBERNETES / "base"
PROXY = KUBERNETES.parent / "proxy"

Manifest = dict[str, Any]


def read_documents(path: Path) -> list[Manifest]:
    return list(yaml.safe_load_all(path.read_text()))


def base_manifests() -> Iterator[Manifest]:
    (kustomization,) = read_documents(BASE / "kustomization.yaml")
    for name in kustomization["resources"]:
        yield from read_documents(BASE / name)


def manifest(kind: str, name: str = "multilora") -> Manifest:
    return next(m for m in base_manifests() if m["kind"] == kind and m["metadata"]["name"] == name)


def pod() -> Manifest:
    spec: Manifest = manifest("Deployment")["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize("document", list(base_manifests()), ids=lambda m: f"{m['kind']}-{m['metadata']['name']}")
def test_a_manifest_fits_kubernetes_schema(document: Manifest) -> None:
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_the_schemas_refuse_a_field_that_does_not_exist() -> None:
    broken = manifest("Deployment")
    broken["spec"]["template"]["spec"]["containers"][0]["readyProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, kubernetes_validate.latest_version(), strict=True)


def test_every_file_of_the_base_is_used() -> None:
    (kustomization,) = read_documents(BASE / "kustomization.yaml")
    assert {path.name for path in BASE.iterdir()} == {"kustomization.yaml", *kustomization["resources"]}


def containers() -> list[Manifest]:
    """The proxy and the server."""
    return [*pod()["initContainers"], *pod()["containers"]]


def test_services_and_policy_name_ports_of_the_proxy_and_the_server_has_none() -> None:
    proxy, server = containers()
    assert "ports" not in server
    assert "--host=127.0.0.1" in server["args"]
    ports = {port["name"] for port in proxy["ports"]}
    services = [m for m in base_manifests() if m["kind"] == "Service"]
    targets = {port["targetPort"] for service in services for port in service["spec"]["ports"]}
    allowed = {p["port"] for rule in manifest("NetworkPolicy")["spec"]["ingress"] for p in rule["ports"]}
    assert targets == allowed == ports


def test_the_proxy_listens_at_its_ports_as_long_as_the_server_runs() -> None:
    (proxy,) = pod()["initContainers"]
    assert proxy["restartPolicy"] == "Always"  # which makes it a sidecar
    listened = {int(port) for port in re.findall(r"listen (\d+)", (PROXY / "listen.conf").read_text())}
    assert {port["containerPort"] for port in proxy["ports"]} == listened


def test_the_server_reads_the_secret_that_the_proxy_draws_in_the_pod() -> None:
    proxy, server = containers()
    (path,) = [
        after for _, given, after in (a.partition("client_header_secret_file=") for a in server["args"]) if given
    ]
    assert all(path in (PROXY / name).read_text() for name in ("start", "peer.js"))
    mounts = [m for each in (proxy, server) for m in each["volumeMounts"] if m["mountPath"] == str(Path(path).parent)]
    assert [(mount["name"], mount.get("readOnly", False)) for mount in mounts] == [("secret", False), ("secret", True)]
    (volume,) = [volume for volume in pod()["volumes"] if volume["name"] == "secret"]
    assert volume["emptyDir"]["medium"] == "Memory"


def test_every_image_is_one_that_is_built_here() -> None:
    (kustomization,) = read_documents(BASE / "kustomization.yaml")
    images = {image["name"]: image["newTag"] for image in kustomization["images"]}
    assert {container["image"] for container in containers()} == set(images)
    assert all((KUBERNETES.parent / f"{tag}.Dockerfile").is_file() for tag in images.values())


def test_prometheus_is_sent_to_the_proxy() -> None:
    annotations = manifest("Deployment")["spec"]["template"]["metadata"]["annotations"]
    (metrics,) = [port["containerPort"] for port in containers()[0]["ports"] if port["name"] == "metrics"]
    assert annotations["prometheus.io/port"] == str(metrics)


def test_selectors_find_the_pods() -> None:
    deployment = manifest("Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    services = [m for m in base_manifests() if m["kind"] == "Service"]
    selectors = [
        deployment["spec"]["selector"]["matchLabels"],
        manifest("NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        *(service["spec"]["selector"] for service in services),
    ]
    assert all(selector.items() <= labels.items() for selector in selectors)


def test_volumes_are_mounted_and_claims_exist() -> None:
    volumes = {volume["name"]: volume for volume in pod()["volumes"]}
    assert {mount["name"] for container in containers() for mount in container["volumeMounts"]} == set(volumes)
    claims = {v["persistentVolumeClaim"]["claimName"] for v in volumes.values() if "persistentVolumeClaim" in v}
    assert claims == {m["metadata"]["name"] for m in base_manifests() if m["kind"] == "PersistentVolumeClaim"}


def test_what_is_written_at_run_time_is_mounted_and_the_rest_is_read_only() -> None:
    writable = [
        {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        for container in containers()
    ]
    assert all(container["securityContext"]["readOnlyRootFilesystem"] is True for container in containers())
    assert writable == [{"/tmp", "/secret"}, {"/cache", "/tmp", "/dev/shm"}]


def test_the_autoscaler_scales_the_deployment() -> None:
    target = manifest("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    deployment = manifest("Deployment")
    assert target == {"apiVersion": deployment["apiVersion"], "kind": "Deployment", "name": "multilora"}


def test_the_gpu_overlay_gives_a_gpu_that_must_serve_more_shared_memory_and_a_place_for_compiled_kernels() -> None:
    (overlay,) = read_documents(KUBERNETES / "gpu" / "kustomization.yaml")
    deployment = patched(manifest("Deployment"), overlay)
    kubernetes_validate.validate(deployment, kubernetes_validate.latest_version(), strict=True)
    spec = deployment["spec"]["template"]["spec"]
    (server,), (plain,) = spec["containers"], pod()["containers"]
    assert server["resources"]["limits"] == {**plain["resources"]["limits"], "nvidia.com/gpu": 1}
    assert server["args"] == [*plain["args"], "--set=device=cuda"]
    assert server["env"] == [{"name": "TRITON_CACHE_DIR", "value": "/compiled"}]
    assert server["volumeMounts"] == [*plain["volumeMounts"], {"name": "compiled", "mountPath": "/compiled"}]
    changed = [volume for volume in spec["volumes"] if volume not in pod()["volumes"]]
    assert [volume["name"] for volume in changed] == ["shm", "compiled"]
    assert all(volume["emptyDir"]["sizeLimit"] for volume in changed)
