"""The Helm chart: its manifests are valid, and safe unless someone says otherwise."""

from __future__ import annotations

import re
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

import msdg_vllm
from deploy.dockerfile import read_stages
from msdg_vllm.console import PROBE_PATHS
from server.launcher import make_parser
from tests.chart import (
    CHART,
    EVERYTHING,
    ON_A_CPU,
    REQUIRED,
    default_values,
    render,
    validate,
)
from tests.deployment import DEPLOY

CASES = {"required": REQUIRED, "everything": EVERYTHING, "on a CPU": ON_A_CPU}
VERSIONS = ("1.29", kubernetes_validate.latest_version())

every_case = pytest.mark.parametrize("values", CASES.values(), ids=CASES)


def pod_of(manifests: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = manifests["Deployment"]["spec"]["template"]["spec"]
    return pod


def container_of(manifests: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod_of(manifests)["containers"]
    return dict(container)


@pytest.mark.parametrize("version", VERSIONS)
@every_case
def test_the_manifests_are_valid(values: dict[str, Any], version: str) -> None:
    for kind, manifest in render(values).items():
        if kind != "ServiceMonitor":
            kubernetes_validate.validate(manifest, version, strict=True)


def test_the_validation_can_fail() -> None:
    manifest = render(REQUIRED)["Deployment"]
    manifest["spec"]["replicas"] = "many"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)


def test_the_service_monitor_scrapes_the_port_of_the_service() -> None:
    manifests = render(EVERYTHING)
    manifest = manifests["ServiceMonitor"]
    assert manifest["apiVersion"] == "monitoring.coreos.com/v1"
    assert manifest.keys() == {"apiVersion", "kind", "metadata", "spec"}
    assert manifest["spec"].keys() == {"selector", "endpoints"}
    assert manifest["spec"]["selector"].keys() == {"matchLabels"}
    (port,) = manifests["Service"]["spec"]["ports"]
    assert manifest["spec"]["endpoints"] == [
        {"port": port["name"], "path": "/metrics", "interval": "15s"}
    ]
    assert manifest["metadata"]["labels"]["release"] == "prometheus"


def test_what_needs_an_addition_to_the_cluster_is_off_by_default() -> None:
    always = {"Deployment", "Service", "PodDisruptionBudget"}
    assert render(REQUIRED).keys() == always
    assert render(EVERYTHING).keys() == always | {"HorizontalPodAutoscaler", "ServiceMonitor"}


@every_case
def test_everything_selects_the_pods_of_the_deployment(values: dict[str, Any]) -> None:
    manifests = render(values)
    labels = manifests["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    assert manifests["Service"]["spec"]["selector"].items() <= labels
    for kind in ("Deployment", "PodDisruptionBudget"):
        assert manifests[kind]["spec"]["selector"]["matchLabels"].items() <= labels
    if "ServiceMonitor" in manifests:
        selected = manifests["ServiceMonitor"]["spec"]["selector"]["matchLabels"].items()
        assert selected <= manifests["Service"]["metadata"]["labels"].items()


@every_case
def test_the_server_understands_its_arguments(values: dict[str, Any]) -> None:
    options = make_parser().parse_args(container_of(render(values))["args"])
    assert options.model == values["model"]
    assert options.default_retention == values.get("defaultRetention", 1.0)
    assert options.tensor_parallel_size == values.get("tensorParallelSize", 1)
    hosts = values.get("limits", {}).get("mediaDomains", ["none.invalid"])
    assert options.allowed_media_domains == hosts


def test_a_pod_asks_for_as_many_gpus_as_share_the_model() -> None:
    assert container_of(render(EVERYTHING))["resources"]["limits"] == {"nvidia.com/gpu": 2}
    memory = {"resources": {"limits": {"memory": "64Gi"}}}
    limits = container_of(render({**REQUIRED, **memory}))["resources"]["limits"]
    assert limits == {"nvidia.com/gpu": 1, "memory": "64Gi"}
    assert "limits" not in container_of(render(ON_A_CPU))["resources"]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {**REQUIRED, "model": ""},
        {**REQUIRED, "apiKey": {"existingSecret": ""}},
        {**REQUIRED, "defaultRetention": 0},
        {**REQUIRED, "tensorParalellSize": 2},
    ],
    ids=["nothing", "no model", "no key", "retention 0", "misspelt"],
)
def test_wrong_values_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        validate(values)


def test_the_key_comes_from_a_secret_and_stands_nowhere_else() -> None:
    manifests = render(REQUIRED)
    (key,) = (env for env in container_of(manifests)["env"] if env["name"] == "VLLM_API_KEY")
    assert key["valueFrom"] == {"secretKeyRef": {"name": "msdg-key", "key": "api-key"}}
    assert "--api-key" not in str(manifests)


@every_case
def test_a_pod_has_no_rights_it_does_not_need(values: dict[str, Any]) -> None:
    pod = pod_of(render(values))
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    rights = container_of(render(values))["securityContext"]
    assert rights["allowPrivilegeEscalation"] is False
    assert rights["readOnlyRootFilesystem"] is True
    assert rights["capabilities"] == {"drop": ["ALL"]}


def test_the_pod_runs_as_the_user_of_the_image_and_mounts_its_home() -> None:
    image = read_stages()["gpu"]
    manifests = render(REQUIRED)
    assert str(pod_of(manifests)["securityContext"]["runAsUser"]) == image.last("USER").text
    mounts = {mount["mountPath"] for mount in container_of(manifests)["volumeMounts"]}
    assert set(image.last("VOLUME").words) <= mounts


def test_the_probes_ask_for_health_and_allow_a_slow_start() -> None:
    container = container_of(render(REQUIRED))
    (port,) = container["ports"]
    for name, path in (
        ("startupProbe", "/health"),
        ("readinessProbe", "/health/ready"),
        ("livenessProbe", "/health/live"),
    ):
        assert container[name]["httpGet"] == {"path": path, "port": port["name"]}
        assert path in PROBE_PATHS
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 30 * 60


def test_the_autoscaler_reads_what_the_adapter_offers() -> None:
    adapter = yaml.safe_load((DEPLOY / "prometheus" / "adapter-values.yaml").read_text())
    queue, level = adapter["rules"]["custom"]
    metrics = render(EVERYTHING)["HorizontalPodAutoscaler"]["spec"]["metrics"]
    names = [metric["pods"]["metric"]["name"] for metric in metrics]
    assert names == [queue["name"]["as"], level["name"]["as"]]
    assert queue["seriesQuery"].startswith("vllm:num_requests_waiting{")
    assert level["seriesQuery"].startswith("msdg_retention_level{")


def test_the_autoscaler_looks_at_the_level_only_where_it_is_told_to() -> None:
    autoscaled = {**REQUIRED, "autoscaling": {"enabled": True}}
    (metric,) = render(autoscaled)["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == "vllm_num_requests_waiting"


def test_the_autoscaler_alone_decides_on_the_replicas() -> None:
    assert render(REQUIRED)["Deployment"]["spec"]["replicas"] == 1
    assert "replicas" not in render(EVERYTHING)["Deployment"]["spec"]


def test_every_value_is_used_and_every_used_one_exists() -> None:
    texts = [path.read_text() for path in (CHART / "templates").iterdir()]
    used = {name for text in texts for name in re.findall(r"\.Values\.([\w.]+)", text)}
    known = set()
    for name, value in default_values().items():
        nested = isinstance(value, dict) and not any(f.split(".") == [name] for f in used)
        known |= {f"{name}.{inner}" for inner in value} if nested else {name}
    assert used == known


def test_the_chart_has_the_version_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == msdg_vllm.__version__
