"""What GET /v1/pruning says about the server."""

from __future__ import annotations

import dataclasses
from typing import Any

from pydantic import BaseModel
from vllm.engine.protocol import EngineClient

import msdg_vllm
from msdg_vllm.core.errors import SettingsError
from msdg_vllm.engine.api.processor import PruningProcessor
from msdg_vllm.engine.worker.explanations import LIFETIME_SECONDS, MAX_BYTES, MAX_REQUESTS
from msdg_vllm.request import METHODS, QUERY_MODES, SCOPES
from server.adaptive.keeper import TargetKeeper


class EncoderDescription(BaseModel):
    """The encoder profile in use; null when there is none for the model's encoder."""

    name: str | None
    profile: dict[str, Any] | None


class Limits(BaseModel):
    """What the server puts up with; null means no limit of its own."""

    min_retention: float | None
    max_visual_tokens: int | None
    max_visual_tokens_per_request: int | None
    explain: bool
    items_per_request: dict[str, int | None]
    max_model_len: int
    explanations: int
    explanation_bytes: int
    explanation_seconds: float


class TargetDescription(BaseModel):
    """The time to first token that the server holds, and what it takes at this moment."""

    target_seconds: float
    ceiling: float
    floor: float
    level: float
    backlog_seconds: float
    measured_p95_seconds: float
    measured_requests: int
    is_overloaded: bool


class PruningDescription(BaseModel):
    """What is on, and what a request may ask for."""

    model: str
    architecture: str
    version: str
    encoder: EncoderDescription
    default_retention: float
    default_method: str
    default_query_mode: str
    query_modes: list[str]
    methods: list[str]
    unavailable_methods: dict[str, str]
    scopes: list[str]
    limits: Limits
    adaptive: TargetDescription | None = None


def describe(engine_client: EngineClient, model_name: str) -> PruningDescription:
    """Describe the running server; raises `SettingsError` if its model cannot be pruned."""
    model_config = engine_client.model_config
    processor = engine_client.renderer.get_mm_processor()
    if not isinstance(processor, PruningProcessor):
        raise SettingsError(
            f"{model_name} cannot be pruned: {type(processor).__name__} handles its images; "
            f"supported are {', '.join(sorted(msdg_vllm.ARCHITECTURES))}. To serve it without "
            "pruning start vLLM itself"
        )
    offer = processor.offer
    found, settings = offer.profile, offer.settings
    methods, unmet = offer.methods, offer.unmet_needs
    return PruningDescription(
        model=model_name,
        architecture=model_config.architecture,
        version=msdg_vllm.__version__,
        encoder=EncoderDescription(
            name=found and found.name, profile=found and dataclasses.asdict(found.profile)
        ),
        default_retention=settings.default_retention,
        default_method=offer.default_method,
        default_query_mode=settings.query_mode,
        query_modes=list(QUERY_MODES),
        methods=methods,
        unavailable_methods={
            name: f"reads {unmet[name]}"
            if name in unmet
            else "not allowed by the operator (--methods)"
            for name in METHODS
            if name not in methods
        },
        scopes=list(SCOPES),
        limits=Limits(
            min_retention=settings.min_retention,
            max_visual_tokens=settings.max_visual_tokens,
            max_visual_tokens_per_request=settings.max_visual_tokens_per_request,
            explain=settings.explain,
            items_per_request=dict(processor.info.allowed_mm_limits),
            max_model_len=model_config.max_model_len,
            explanations=MAX_REQUESTS,
            explanation_bytes=MAX_BYTES,
            explanation_seconds=LIFETIME_SECONDS,
        ),
    )


def describe_target(keeper: TargetKeeper) -> TargetDescription:
    """Describe how the server holds its target."""
    controller = keeper.controller
    status = keeper.refresh()
    return TargetDescription(
        target_seconds=controller.target,
        ceiling=controller.rungs[0],
        floor=controller.rungs[-1],
        level=status.level,
        backlog_seconds=status.backlog_seconds,
        measured_p95_seconds=status.measured_p95_seconds,
        measured_requests=status.num_measured,
        is_overloaded=status.is_overloaded,
    )
