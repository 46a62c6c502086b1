"""Schemathesis on our fields as /openapi.json describes them: nothing brings a server error."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from tests.pictures import picture_of
from tests.server.running import MODEL, Server, image_part, user

EXAMPLES = 60
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"


def only_our_fields(openapi: dict[str, Any]) -> dict[str, Any]:
    """The server's own description, with vLLM's fields held still."""
    schemas = openapi["components"]["schemas"]
    picture = image_part(picture_of("tiny"))
    fixed = {
        CHAT: {"messages": [user("Is there a blue circle?", picture)], "max_tokens": 1},
        RESPONSES: {"input": "Is there a blue circle?", "max_output_tokens": 1},
    }
    paths = {
        path: operations
        for path, operations in openapi["paths"].items()
        if path in fixed or path.startswith("/v1/pruning")
    }
    for path, fields in fixed.items():
        content = paths[path]["post"]["requestBody"]["content"]["application/json"]
        body = schemas[content["schema"]["$ref"].rsplit("/", 1)[1]]
        still = {name: {"const": value} for name, value in {**fields, "model": MODEL}.items()}
        ours = {name: body["properties"][name] for name in ("retention", "pruning")}
        content["schema"] = {
            "type": "object",
            "properties": {**still, **ours},
            "required": [*still, *ours],
            "additionalProperties": False,
        }
    return {**openapi, "paths": paths}


@pytest.fixture(scope="module")
def api(server: Server) -> Any:
    schema = schemathesis.openapi.from_dict(only_our_fields(server.get("/openapi.json").json()))
    schema.config.update(base_url=server.url)
    return schema


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [
        ("POST", CHAT, GenerationMode.POSITIVE),
        ("POST", CHAT, GenerationMode.NEGATIVE),
        ("POST", RESPONSES, GenerationMode.POSITIVE),
        ("POST", RESPONSES, GenerationMode.NEGATIVE),
        # Any text is an id, so there are no wrong ones to make up.
        ("GET", "/v1/pruning", GenerationMode.POSITIVE),
        ("GET", "/v1/pruning/{explanation_id}", GenerationMode.POSITIVE),
        ("GET", "/v1/pruning/{explanation_id}/overlay.png", GenerationMode.POSITIVE),
    ],
)
def test_nothing_brings_a_server_error(
    api: Any, method: str, path: str, mode: GenerationMode
) -> None:
    operation = api[path][method]
    statuses = set()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        answer = case.call(timeout=60)
        case.validate_response(answer, checks=[not_a_server_error])
        statuses.add(answer.status_code)

    send()
    assert statuses
    assert max(statuses) < 500
    if method == "POST":
        # What is wrong may also be a field that vLLM passes over, so a 200 proves nothing there.
        assert (200 if mode is GenerationMode.POSITIVE else 400) in statuses
