"""What the server says about itself: /v1/pruning, /openapi.json, and vLLM's own routes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from msdg_vllm.methods import METHODS, ON_DEMAND
from tests.server.running import MODEL, Server


@pytest.fixture(scope="module")
def openapi(server: Server) -> dict[str, Any]:
    schema: dict[str, Any] = server.get("/openapi.json").json()
    return schema


def body_schema(openapi: dict[str, Any], path: str) -> dict[str, Any]:
    content = openapi["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    name = content["schema"]["$ref"].rsplit("/", 1)[1]
    schema: dict[str, Any] = openapi["components"]["schemas"][name]
    return schema


def test_pruning_is_described(server: Server, checkpoint: Path) -> None:
    described = server.get("/v1/pruning").json()
    assert described["model"] == MODEL
    assert described["architecture"] == "LlavaForConditionalGeneration"
    assert described["encoder"]["profile"] == {
        **json.loads((checkpoint / "msdg_profile.json").read_text()),
        "output_layer": None,
        "grouping": "direction",
        "saliency_scale": 1.0,
        "provenance": None,
    }
    assert described["default_retention"] == 1.0
    assert described["default_query_mode"] == "image-turn"
    assert described["default_method"] == "msdg"
    scaling = {name for name in METHODS if "resize" in name}
    unavailable = {*ON_DEMAND, *scaling}
    assert described["methods"] == [name for name in METHODS if name not in unavailable]
    assert described["unavailable_methods"].keys() == unavailable
    assert described["limits"]["items_per_request"] == {"image": 4}
    assert described["limits"]["max_model_len"] == 2048


def test_health_stays_vllms_and_models_have_their_aliases(server: Server) -> None:
    assert server.get("/health").status_code == 200
    models = [model.id for model in server.client.models.list().data]
    assert models == [MODEL, f"{MODEL}@0.333", f"{MODEL}@0.111"]


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses"]
)
def test_the_fields_are_documented(openapi: dict[str, Any], path: str) -> None:
    properties = body_schema(openapi, path)["properties"]
    assert {"retention", "pruning", "model"} <= properties.keys()
    number = {"type": "number", "exclusiveMinimum": 0.0, "maximum": 1.0}
    assert number in properties["retention"]["anyOf"]
    options = openapi["components"]["schemas"]["PruningOptions"]
    assert options["additionalProperties"] is False
    assert options["properties"].keys() == {"query", "query_mode", "method", "scope", "explain"}


def test_all_of_vllms_fields_are_still_there(openapi: dict[str, Any]) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    properties = body_schema(openapi, "/v1/chat/completions")["properties"]
    ours = {"retention", "max_visual_tokens", "pruning"}
    assert properties.keys() == {*ChatCompletionRequest.model_fields, *ours}


def test_the_key_of_an_image_is_documented(openapi: dict[str, Any]) -> None:
    schemas = openapi["components"]["schemas"]
    for name in ("ChatCompletionContentPartImageParam", "ResponseInputImageParam"):
        assert "retention" in schemas[name]["properties"], name
