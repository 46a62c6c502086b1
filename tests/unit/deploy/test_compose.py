"""The compose file: valid, safe by default, and in step with the chart and the images."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any

import jsonschema
import pytest
import yaml

from deploy.dockerfile import read_stages
from server.launcher import make_parser
from tests.chart import REQUIRED, render
from tests.deployment import DEPLOY, compose_server, compose_text, dashboard, queries, selectors

TEXT = {"type": "string"}
TEXTS = {"type": "array", "items": TEXT}
TEXT_BY_NAME = {"type": "object", "additionalProperties": {"type": ["string", "null"]}}


def only(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


DEVICE = only(driver=TEXT, count={"enum": ["all"]}, capabilities=TEXTS)
SERVICE = only(
    image={"type": "string", "pattern": r"^[a-z0-9./-]+(:[\w.-]+)?$"},
    build=only(context=TEXT, target=TEXT),
    command=TEXTS,
    environment=TEXT_BY_NAME,
    labels=TEXT_BY_NAME,
    ports={"type": "array", "items": {"type": "string", "pattern": r"^[\d.]+:\d+:\d+$"}},
    volumes={"type": "array", "items": {"type": "string", "pattern": r"^[^:]+:/[^:]+(:ro)?$"}},
    shm_size={"type": "string", "pattern": r"^\d+(kb|mb|gb)$"},
    stop_grace_period={"type": "string", "pattern": r"^\d+s$"},
    cap_drop=TEXTS,
    security_opt=TEXTS,
    restart={"enum": ["no", "always", "on-failure", "unless-stopped"]},
    depends_on=TEXTS,
    deploy=only(
        resources=only(reservations=only(devices={"type": "array", "items": DEVICE})),
    ),
)
# The part of the Compose specification that our files use.
COMPOSE = only(
    name=TEXT,
    services={"type": "object", "additionalProperties": SERVICE},
    volumes={"type": "object", "additionalProperties": {"type": "null"}},
)


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(compose_text())["services"]
    return found


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_the_files_follow_the_compose_specification(name: str) -> None:
    jsonschema.validate(yaml.safe_load(compose_text(name)), COMPOSE)


@pytest.mark.parametrize("line", ["    restrt: always", "    shm_size: 1g b", "    command: 8"])
def test_the_specification_refuses_what_compose_would(line: str) -> None:
    text = compose_text("compose.gpu.yaml").replace("    image:", f"{line}\n    image:")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load(text), COMPOSE)


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_the_server_is_built_from_a_target_that_exists(name: str) -> None:
    server = yaml.safe_load(compose_text(name))["services"]["server"]
    assert server["build"]["target"] in read_stages()


def test_without_a_key_and_a_password_nothing_starts() -> None:
    text = (DEPLOY / "compose.yaml").read_text()
    required = re.findall(r"\$\{(\w+):\?", text)
    assert required == ["VLLM_API_KEY", "GRAFANA_PASSWORD"]


def test_nothing_listens_beyond_this_machine_by_default(services: dict[str, Any]) -> None:
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_the_server_understands_its_command() -> None:
    server = compose_server()
    options = make_parser().parse_args(server["command"])
    assert options.model == "models/scenes-llava"
    assert options.allowed_media_domains == ["none.invalid"]


def test_compose_and_chart_have_the_same_limits() -> None:
    def limits(arguments: list[str]) -> set[str]:
        changing = ("--model=", "--tensor-parallel-size=", "--default-retention=")
        return {argument for argument in arguments if not argument.startswith(changing)}

    server = compose_server()
    (container,) = render(REQUIRED)["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert limits(server["command"]) == limits(container["args"])
    variables = {env["name"]: env.get("value") for env in container["env"]}
    server["environment"].pop("HF_TOKEN")  # in the cluster only where a Secret has one
    assert server["environment"].keys() == variables.keys()
    for name in variables.keys() - {"VLLM_API_KEY"}:
        assert server["environment"][name] == variables[name]


def test_every_mounted_file_exists(services: dict[str, Any]) -> None:
    mounts = [mount for service in services.values() for mount in service.get("volumes", [])]
    folders = [mount.split(":")[0] for mount in mounts if mount.startswith("./")]
    assert folders
    assert all((DEPLOY / folder).is_dir() for folder in folders)


def test_prometheus_scrapes_the_server(services: dict[str, Any]) -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    ((target,),) = (entry["targets"] for entry in job["static_configs"])
    name, port = target.split(":")
    assert name in services
    assert port in [mapping.rsplit(":", 1)[1] for mapping in services[name]["ports"]]


def test_grafana_finds_its_data_and_its_dashboard(services: dict[str, Any]) -> None:
    folder = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((folder / "datasources" / "prometheus.yaml").read_text())[
        "datasources"
    ]
    assert source["url"].removeprefix("http://").split(":")[0] in services
    used = {panel["datasource"]["uid"] for panel in dashboard()["panels"]}
    used |= {variable["datasource"]["uid"] for variable in dashboard()["templating"]["list"]}
    assert used == {source["uid"]}
    (provider,) = yaml.safe_load((folder / "dashboards" / "msdg-vllm.yaml").read_text())[
        "providers"
    ]
    assert (
        f"./grafana/dashboards:{provider['options']['path']}:ro" in services["grafana"]["volumes"]
    )


def test_the_panels_do_not_cover_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {
            (place["x"] + column, place["y"] + row)
            for column in range(place["w"])
            for row in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(column for column, _ in cells) < 24, panel["title"]
        taken |= cells


def test_panels_have_ids_titles_and_descriptions_of_their_own() -> None:
    panels = dashboard()["panels"]
    for key in ("id", "title"):
        assert len({panel[key] for panel in panels}) == len(panels)
    assert all(panel["description"] for panel in panels)


@pytest.mark.parametrize(("place", "query"), list(queries()))
def test_a_query_is_promql(place: str, query: str) -> None:
    assert selectors(query)


@pytest.mark.parametrize("topic", ["first_token", "selection", "tokens_kept", "cache_hits", "kv_"])
def test_the_dashboard_shows_what_it_is_for(topic: str) -> None:
    names = {found.name for _, query in queries() for found in selectors(query)}
    assert any(topic in name for name in names)


def test_promtool_accepts_the_configuration() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt install prometheus)")
    folder = DEPLOY / "prometheus"
    done = subprocess.run(
        [promtool, "check", "config", "prometheus.yml"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
