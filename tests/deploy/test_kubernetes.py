"""The manifests, put together: valid by Kubernetes' own schemas, true to our flags and probes."""

import copy
import functools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate import utils as schemas

from executor.config import ExecutorSettings
from router.config import RouterSettings
from rpc.health import LIVENESS, READINESS
from rpc.settings import ServiceSettings, load
from scheduler.config import SchedulerSettings

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
OVERLAYS = ("base", "gpu", "tls")
TIERS: dict[str, type[ServiceSettings]] = {
    "router": RouterSettings,
    "scheduler": SchedulerSettings,
    "executor": ExecutorSettings,
}
OLDEST, NEWEST = "1.27", schemas.all_versions()[-1]  # gRPC probes came with 1.27
Manifest = dict[str, Any]


@functools.cache
def rendered(overlay: str) -> list[Manifest]:
    """What an overlay comes to. The base is the sum of its files; for the others a kustomize must be here."""
    if overlay == "base":
        files = yaml.safe_load((FOLDER / "base" / "kustomization.yaml").read_text())["resources"]
        texts = [(FOLDER / "base" / name).read_text() for name in files]
        return [manifest for text in texts for manifest in yaml.safe_load_all(text)]
    commands = {"kustomize": ("kustomize", "build"), "kubectl": ("kubectl", "kustomize")}
    command = next((command for name, command in commands.items() if shutil.which(name)), None)
    if command is None:
        pytest.skip("there is neither kustomize nor kubectl here")
    done = subprocess.run(
        [*command, str(FOLDER / overlay)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def workloads(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Pod templates by tier."""
    kinds = {"Deployment", "StatefulSet"}
    return {
        one["metadata"]["name"]: one["spec"]["template"]["spec"] for one in manifests if one["kind"] in kinds
    }


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_is_valid_by_the_published_schemas(overlay: str, version: str) -> None:
    manifests = rendered(overlay)
    assert set(workloads(manifests)) == set(TIERS)
    for manifest in manifests:
        schemas.validate(manifest, version, strict=True)


def test_a_misspelt_field_would_be_found() -> None:
    broken = copy.deepcopy(next(one for one in rendered("base") if one["kind"] == "Deployment"))
    broken["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(schemas.ValidationError, match="readynessProbe"):
        schemas.validate(broken, NEWEST, strict=True)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_each_service_takes_its_flags_and_variables(
    overlay: str, tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (container,) = workloads(rendered(overlay))[tier]["containers"]
    for variable in container.get("env", []):
        monkeypatch.setenv(variable["name"], variable.get("value", f"{tier}-0"))
    settings = load(TIERS[tier], container["args"], prog=tier)
    ports = {port["containerPort"] for port in container["ports"]}
    doors = [settings.listen, settings.metrics_listen, *filter(None, [getattr(settings, "http", "")])]
    assert {int(door.rpartition(":")[2]) for door in doors} == ports
    assert settings.demands_certificates == (overlay == "tls")


@pytest.mark.parametrize("tier", TIERS)
def test_policies_let_who_calls_a_tier_to_its_doors_and_one_namespace_to_the_metrics(tier: str) -> None:
    (container,) = workloads(rendered("base"))[tier]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    (policy,) = [
        one["spec"]
        for one in rendered("base")
        if (one["kind"], one["metadata"]["name"]) == ("NetworkPolicy", tier)
    ]
    assert policy["podSelector"] == {"matchLabels": {"app.kubernetes.io/component": tier}}
    doors, metrics = policy["ingress"]
    assert {port["port"] for port in metrics["ports"]} == {ports.pop("metrics")}
    assert [list(who) for who in metrics["from"]] == [["namespaceSelector"]]
    assert {port["port"] for port in doors["ports"]} == set(ports.values())
    caller = {"scheduler": "router", "executor": "scheduler"}.get(tier)
    labels = [
        who["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for who in doors.get("from", [])
    ]
    assert labels == ([] if caller is None else [caller])


def test_the_scrape_config_finds_each_tier_by_the_labels_and_the_port_that_pods_have() -> None:
    config = yaml.safe_load((FOLDER.parent / "prometheus" / "kubernetes.yaml").read_text())
    (job,) = config["scrape_configs"]
    kept, named, _ = job["relabel_configs"]
    part_of, port = kept["regex"].split(";")
    (pairs,) = yaml.safe_load((FOLDER / "base" / "kustomization.yaml").read_text())["labels"]
    assert (pairs["pairs"], pairs["includeTemplates"]) == ({"app.kubernetes.io/part-of": part_of}, True)
    for manifest in rendered("base"):
        if manifest["kind"] in {"Deployment", "StatefulSet"}:
            tier, template = manifest["metadata"]["name"], manifest["spec"]["template"]
            component = template["metadata"]["labels"]["app.kubernetes.io/component"]
            assert named["replacement"].replace("$1", component) == f"chairlift-{tier}"
            assert port in {one["name"] for one in template["spec"]["containers"][0]["ports"]}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_service_of_the_namespace_puts_variables_into_a_pod(overlay: str) -> None:
    """One named `chairlift` would: CHAIRLIFT_PORT, which settings refuse."""
    assert all(pod["enableServiceLinks"] is False for pod in workloads(rendered(overlay)).values())


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_probes_ask_the_health_names_there_are_at_a_port_that_is_open(overlay: str, tier: str) -> None:
    (container,) = workloads(rendered(overlay))[tier]["containers"]
    ports = {port["containerPort"] for port in container["ports"]}
    probes = {kind: probe for kind, probe in container.items() if kind.endswith("Probe")}
    assert {"livenessProbe", "readinessProbe"} <= set(probes)
    for probe in probes.values():
        if overlay == "tls":
            address, service = probe["exec"]["command"][3:5]
            port = int(address.rpartition(":")[2])
            assert "grpc" not in probe
        else:
            port, service = probe["grpc"]["port"], probe["grpc"]["service"]
        assert port in ports
        assert service in {LIVENESS, READINESS}
    asked = probes["livenessProbe"]
    assert LIVENESS in (asked["exec"]["command"] if overlay == "tls" else asked["grpc"].values())


def test_probes_that_start_a_process_may_be_late_once() -> None:
    for pod in workloads(rendered("tls")).values():
        (container,) = pod["containers"]
        assert container["readinessProbe"].get("failureThreshold", 3) >= 3


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_names_that_objects_call_each_other_by_exist(overlay: str) -> None:
    manifests = rendered(overlay)
    named = {(one["kind"], one["metadata"]["name"]) for one in manifests}
    for tier, pod in workloads(manifests).items():
        assert ("Service", tier) in named
        assert ("PodDisruptionBudget", tier) in named
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for volume in volumes.values():
            claim = volume.get("persistentVolumeClaim")
            assert claim is None or ("PersistentVolumeClaim", claim["claimName"]) in named
        for mount in pod["containers"][0]["volumeMounts"]:
            assert mount["name"] in volumes
    scheduler = next(
        one for one in manifests if (one["kind"], one["metadata"]["name"]) == ("StatefulSet", "scheduler")
    )
    pods = [f"scheduler-{i}.scheduler:50052" for i in range(scheduler["spec"]["replicas"])]
    (router,) = workloads(manifests)["router"]["containers"]
    assert f"--scheduler={'|'.join(pods)}" in router["args"]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_container_has_more_rights_than_it_needs(overlay: str, tier: str) -> None:
    pod = workloads(rendered(overlay))[tier]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert not pod["automountServiceAccountToken"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_the_gpu_overlay_asks_for_a_gpu_for_each_executor() -> None:
    (container,) = workloads(rendered("gpu"))["executor"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert container["resources"]["limits"]["memory"]


def test_the_tls_overlay_gives_each_tier_its_own_certificate() -> None:
    for tier, pod in workloads(rendered("tls")).items():
        (secret,) = [volume["secret"] for volume in pod["volumes"] if volume["name"] == "tls"]
        assert secret["secretName"] == f"{tier}-tls"
