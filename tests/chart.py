"""The Helm chart rendered without Helm, by a Go template engine with Helm's functions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from gotpl.exts.helm import HelmTemplateEngine

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy" / "kubernetes"

REQUIRED: dict[str, Any] = {
    "model": "llava-hf/llava-1.5-7b-hf",
    "apiKey": {"existingSecret": "msdg-key"},
}
EVERYTHING: dict[str, Any] = {
    **REQUIRED,
    "defaultRetention": 0.222,
    "tensorParallelSize": 2,
    "autoscaling": {"enabled": True, "maxReplicas": 8, "retentionShortfall": "500m"},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "huggingFace": {"existingSecret": "hub"},
    "limits": {"mediaDomains": ["images.example.com", "cdn.example.com"]},
    "cache": {"existingClaim": "models"},
    "extraArgs": ["--max-model-len=4096"],
    "env": [{"name": "VLLM_LOGGING_LEVEL", "value": "WARNING"}],
    "podAnnotations": {"team": "vision"},
    "nodeSelector": {"gpu": "a100"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
}
ON_A_CPU: dict[str, Any] = {**REQUIRED, "gpu": {"enabled": False}}


def default_values() -> dict[str, Any]:
    """What values.yaml says."""
    values: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    return values


def validate(values: Mapping[str, Any]) -> None:
    """Check values as Helm does before it renders; raises `jsonschema.ValidationError`."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.validate(_merged(default_values(), values), schema)


def render(values: Mapping[str, Any], release: str = "prod") -> dict[str, Any]:
    """Render every template; return the manifests by kind."""
    validate(values)
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    context = {
        "Values": _as_helm_reads(_merged(default_values(), values)),
        "Chart": {name[0].upper() + name[1:]: text for name, text in chart.items()},
        "Release": {"Name": release, "Namespace": "default", "Service": "Helm"},
    }
    sources = {path.name: path.read_text() for path in (CHART / "templates").iterdir()}
    rendered = HelmTemplateEngine(sources).render(
        {name: context for name in sources if name.endswith((".yaml", ".txt"))}
    )
    manifests = [yaml.safe_load(text) for name, text in rendered.items() if ".yaml" in name]
    return {manifest["kind"]: manifest for manifest in manifests if manifest}


def _merged(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for name, value in overrides.items():
        both = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = _merged(merged[name], value) if both else value
    return merged


def _as_helm_reads(value: Any) -> Any:
    """Turn every number into a float, as Helm does: 50000000 is 5e+07 where it is just printed."""
    if isinstance(value, dict):
        return {name: _as_helm_reads(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_as_helm_reads(item) for item in value]
    return float(value) if type(value) is int else value
