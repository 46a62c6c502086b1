"""The endpoint plugin: vLLM's own routes with typed pruning fields, and routes of our own.

Handlers stay vLLM's. The chat, batch and Responses routes differ from stock only in the type of
their body; what happens to it is in `server.rendering` and `server.usage`.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Path, Query, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import State
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.anthropic import api_router as anthropic
from vllm.entrypoints.anthropic.protocol import AnthropicErrorResponse
from vllm.entrypoints.openai.chat_completion import api_router as chat
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.responses import api_router as responses
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm.exceptions import VLLMNotFoundError, VLLMValidationError

from msdg_vllm.engine.hooks import wrap
from msdg_vllm.settings import Settings
from server import (
    access,
    front_page,
    greeting,
    playground,
    probes,
    refusals,
    rendering,
    shutdown,
)
from server.adaptive.keeper import start_keeper
from server.description import PruningDescription, describe, describe_target
from server.metrics import MetricsPage, RequestMetrics, watch_first_tokens
from server.overlay import draw_overlay, draw_picture
from server.schemas import (
    IMAGE_FIELDS,
    IMAGE_PARTS,
    Explanation,
    PruningBatchRequest,
    PruningChatRequest,
    PruningCountRequest,
    PruningFields,
    PruningMessagesRequest,
    PruningResponsesRequest,
    check_messages,
)
from server.usage import report, report_in_stream, report_message
from server.workers import ask_workers

router = APIRouter()

_JSON_ONLY = [Depends(validate_json_request)]
_Responses = dict[int | str, dict[str, Any]]
_ERRORS: _Responses = {status: {"model": ErrorResponse} for status in (400, 404, 500, 501)}
_STREAM: _Responses = {200: {"content": {"text/event-stream": {}}}}
_EXPLANATION_ERRORS: _Responses = {status: {"model": ErrorResponse} for status in (404, 503)}
_PNG: _Responses = {200: {"content": {"image/png": {}}}, **_EXPLANATION_ERRORS}

RETENTION_HEADER = "X-MSDG-Retention"

ExplanationId = Annotated[
    str, Path(description="`pruning.id` of a response whose request set `pruning.explain`.")
]


@router.post("/v1/chat/completions", dependencies=_JSON_ONLY, responses={**_STREAM, **_ERRORS})
async def create_chat_completion(request: PruningChatRequest, raw_request: Request) -> Any:
    """Answer a chat; `retention` and `pruning` say how much of its images to keep."""
    return _with_header(await chat.create_chat_completion(request, raw_request), request)


@router.post("/v1/chat/completions/batch", dependencies=_JSON_ONLY, responses=_ERRORS)
async def create_batch_chat_completion(request: PruningBatchRequest, raw_request: Request) -> Any:
    """Answer several chats with one retention."""
    return await chat.create_batch_chat_completion(request, raw_request)


@router.post("/v1/responses", dependencies=_JSON_ONLY, responses={**_STREAM, **_ERRORS})
async def create_responses(request: PruningResponsesRequest, raw_request: Request) -> Any:
    """Create a response; `retention` and `pruning` say how much of its images to keep."""
    return _with_header(await responses.create_responses(request, raw_request), request)


def _with_header(response: Any, request: PruningFields) -> Any:
    """Say in a header, which comes before any content, which retention the server chose."""
    if request.chosen_retention is not None:
        response.headers[RETENTION_HEADER] = str(request.chosen_retention)
    return response


async def _in_anthropic_words(raw_request: Request) -> None:
    # Before the body is read as a model, whose errors have OpenAI's shape.
    try:
        check_messages(await raw_request.json())
    except VLLMValidationError as error:
        raise _AnthropicRefusal(str(error)) from None
    except ValueError:
        return  # no JSON: the route itself will say so


class _AnthropicRefusal(Exception):
    """A refusal in the error shape of Anthropic's API."""


_ANTHROPIC_ERRORS: _Responses = {s: {"model": AnthropicErrorResponse} for s in _ERRORS}


@router.post(
    "/v1/messages",
    dependencies=[*_JSON_ONLY, Depends(_in_anthropic_words)],
    responses={**_STREAM, **_ANTHROPIC_ERRORS},
)
async def create_messages(request: PruningMessagesRequest, raw_request: Request) -> Any:
    """Answer a message in Anthropic's format; `retention` and `pruning` mean what they do."""
    return report_message(request, await anthropic.create_messages(request, raw_request))


@router.post(
    "/v1/messages/count_tokens",
    dependencies=[*_JSON_ONLY, Depends(_in_anthropic_words)],
    responses=_ANTHROPIC_ERRORS,
)
async def count_tokens(request: PruningCountRequest, raw_request: Request) -> Any:
    """Count the tokens of a message in Anthropic's format, as many as are left of its images."""
    return await anthropic.count_tokens(request, raw_request)


@router.get("/v1/pruning")
async def show_pruning(raw_request: Request) -> PruningDescription:
    """Describe what is on: model, encoder profile, methods, defaults, limits."""
    state = raw_request.app.state
    description: PruningDescription = state.msdg_description
    if state.msdg_keeper is None:
        return description
    return description.model_copy(update={"adaptive": describe_target(state.msdg_keeper)})


@router.get("/v1/pruning/{explanation_id}", responses=_EXPLANATION_ERRORS)
async def show_explanation(explanation_id: ExplanationId, raw_request: Request) -> Explanation:
    """Return what was kept of each image of an explained request, and why."""
    tiles = await _tiles_of(explanation_id, raw_request, with_pictures=False)
    return Explanation.model_validate({"id": explanation_id, "images": tiles})


@router.get("/v1/pruning/{explanation_id}/overlay.png", response_class=Response, responses=_PNG)
async def show_overlay(explanation_id: ExplanationId, raw_request: Request) -> Response:
    """Return the images of an explained request with the discarded patches greyed out."""
    tiles = await _tiles_of(explanation_id, raw_request, with_pictures=True)
    return Response(draw_overlay(tiles), media_type="image/png")


@router.get("/v1/pruning/{explanation_id}/picture.png", response_class=Response, responses=_PNG)
async def show_picture(
    explanation_id: ExplanationId,
    raw_request: Request,
    index: Annotated[int, Query(ge=0, description="Which image of the request.")] = 0,
    tile: Annotated[int, Query(ge=0, description="Which tile of the image.")] = 0,
) -> Response:
    """Return what the encoder saw of an image, or of one tile of it, with nothing drawn on it."""
    for found in await _tiles_of(explanation_id, raw_request, with_pictures=True):
        if (found["index"], found["tile"]) == (index, tile):
            return Response(draw_picture(found), media_type="image/png")
    raise VLLMNotFoundError(
        f"explanation {explanation_id!r} has no tile {tile} of an image {index}; "
        f"GET /v1/pruning/{explanation_id} lists those it has"
    )


async def _tiles_of(
    explanation_id: str, raw_request: Request, *, with_pictures: bool
) -> list[dict[str, Any]]:
    try:
        key = int(explanation_id, 16) if len(explanation_id) == 16 else 0
    except ValueError:
        key = 0
    if 0 < key < 2**63:
        try:
            answers = await ask_workers(
                raw_request.app.state.engine_client, "msdg_explanation", key, with_pictures
            )
        except TimeoutError:
            raise HTTPException(
                HTTPStatus.SERVICE_UNAVAILABLE, "the engine is too busy to answer; ask again later"
            ) from None
        for tiles in (tiles for answer in answers for tiles in answer if tiles):
            return list(tiles)
    raise VLLMNotFoundError(
        f"no explanation {explanation_id!r}: it never existed, or it has expired (GET /v1/pruning "
        "says how long and how many are kept); send the request again with pruning.explain"
    )


@router.get("/metrics", response_class=Response, include_in_schema=True)
async def show_metrics(raw_request: Request) -> Response:
    """Return the metrics of vLLM and of pruning in Prometheus' text format."""
    if (keeper := raw_request.app.state.msdg_keeper) is not None:
        keeper.refresh()
    page: MetricsPage = raw_request.app.state.msdg_metrics_page
    return Response(await page.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})


class MsdgEndpointPlugin:
    """What vLLM loads when `VLLM_PLUGINS` names `msdg`."""

    name = "msdg"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Replace the routes that take pruning fields, and add our own."""
        routes = [*router.routes, *probes.router.routes, *front_page.router.routes]
        settings = Settings.from_environment()
        if settings.playground and not app.state.args.disable_fastapi_docs:
            routes += playground.router.routes
        app.router.routes.extend(routes)
        app.exception_handler(_AnthropicRefusal)(_anthropic_refusal)
        _document_image_fields(app)
        refusals.install(app, settings.max_request_mb)
        access.install(app, app.state.args)
        app.add_middleware(shutdown.Availability)

    async def init_state(
        self, engine_client: EngineClient | None, state: State, args: Namespace
    ) -> None:
        """Connect the stock handlers to pruning."""
        assert engine_client is not None  # there is one wherever there is the task "generate"
        model_name = state.openai_serving_models.base_model_paths[0].name
        state.msdg_description = describe(engine_client, model_name)
        state.msdg_greeting = asyncio.create_task(greeting.greet(state, args))
        state.msdg_metrics_page = MetricsPage(engine_client, model_name)
        heart = probes.Heart(partial(ask_workers, engine_client, "msdg_statistics", timeout=None))
        state.msdg_condition = probes.Condition(engine_client, heart)
        state.msdg_heart = asyncio.create_task(heart.beat())
        shutdown.install(engine_client, state)
        refusals.refuse_too_many_answers(engine_client)
        metrics = RequestMetrics(model_name)
        rendering.install(state.online_renderer, metrics)
        state.msdg_keeper = start_keeper(engine_client, model_name)
        watch_first_tokens(engine_client, metrics)
        chat = state.openai_serving_chat
        rendering.open_doors(chat, state.anthropic_serving_messages)
        wrap(chat, "chat_completion_full_generator", report)
        wrap(chat, "chat_completion_stream_generator", report_in_stream)
        wrap(state.openai_serving_chat_batch, "chat_completion_full_generator_batch", report)
        wrap(state.openai_serving_responses, "responses_full_generator", report)
        serve_aliases(state.openai_serving_models.base_model_paths, Settings.from_environment())


def serve_aliases(models: list[BaseModelPath], settings: Settings) -> None:
    """Add the names that stand for a retention to the names that are served."""
    models += [
        BaseModelPath(f"{model.name}@{retention}", model.model_path)
        for retention in settings.retention_aliases
        for model in tuple(models)
    ]


async def _anthropic_refusal(_: Request, error: Exception) -> JSONResponse:
    content = {"type": "error", "error": {"type": "invalid_request_error", "message": str(error)}}
    return JSONResponse(content, HTTPStatus.BAD_REQUEST)


def _document_image_fields(app: FastAPI) -> None:
    """Add the keys of an image part to the schemas that vLLM takes from OpenAI's package."""
    stock_openapi = app.openapi

    def openapi() -> dict[str, Any]:
        schema = stock_openapi()
        for name in IMAGE_PARTS:
            if part := schema["components"]["schemas"].get(name):
                part["properties"].update(IMAGE_FIELDS)
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
