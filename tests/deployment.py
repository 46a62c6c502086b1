"""What the files under deploy/ say, read the way their own tools read them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import yaml
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "msdg-vllm.json"


def compose_text(name: str = "compose.yaml") -> str:
    """The text of a compose file where every variable has its default, or the value `given`."""
    return re.sub(
        r"\$\{\w+:([-?])([^}]*)\}",
        lambda found: found[2] if found[1] == "-" else "given",
        (DEPLOY / name).read_text(),
    )


def compose_server() -> dict[str, Any]:
    """The server of compose.yaml; a variable without a value is empty."""
    server: dict[str, Any] = yaml.safe_load(compose_text())["services"]["server"]
    variables = server["environment"].items()
    return {**server, "environment": {name: value or "" for name, value in variables}}


def dashboard() -> dict[str, Any]:
    """The Grafana dashboard."""
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def queries() -> Iterator[tuple[str, str]]:
    """Every PromQL query of the deployment, with the place that it stands in."""
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"].replace("$__rate_interval", "5m")
    for group in yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())["groups"]:
        yield from ((rule["alert"], rule["expr"]) for rule in group["rules"])
    adapter = yaml.safe_load((DEPLOY / "prometheus" / "adapter-values.yaml").read_text())
    yield from (("adapter", rule["seriesQuery"]) for rule in adapter["rules"]["custom"])


def selectors(query: str) -> list[Any]:
    """The selectors of a PromQL query: each names a metric, and labels to match."""
    found = []

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)

    promql_parser.walk(promql_parser.parse(query), visit)
    return found


def not_shown(page: str) -> set[tuple[str, str]]:
    """Return what deploy/ reads of /metrics and this page lacks: metric, and label if only that."""
    families = text_string_to_metric_families(page)
    labels = {sample.name: set(sample.labels) for family in families for sample in family.samples}
    added_by_prometheus = {"instance", "job", "namespace", "pod"}
    missing = set()
    for _, query in queries():
        for selector in selectors(query):
            if selector.name == "up":  # Prometheus' own
                continue
            if selector.name not in labels:
                missing.add((selector.name, ""))
                continue
            wanted = {matcher.name for matcher in selector.matchers.matchers}
            for label in wanted - labels[selector.name] - added_by_prometheus:
                missing.add((selector.name, label))
    return missing
