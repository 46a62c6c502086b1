"""What a request body may say about pruning: typed, documented in /openapi.json, checked early."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_validator,
)
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
)
from vllm.entrypoints.openai.chat_completion.protocol import (
    BatchChatCompletionRequest,
    ChatCompletionRequest,
)
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError

from msdg_vllm.core.errors import RequestError
from msdg_vllm.engine.api.visual_tokens import VisualTokens
from msdg_vllm.request import (
    AUTO,
    MAX_VISUAL_TOKENS,
    METHODS,
    NAMES,
    PRUNING,
    QUERY_MODES,
    RETENTION,
    SCOPES,
    PruningRequest,
    check_names,
    check_parts,
    content_parts,
)
from msdg_vllm.settings import Settings

IMAGE_FIELDS = {
    RETENTION: {
        "title": "Retention",
        "description": "Fraction of this image's tokens to keep, in (0, 1]; wins over the "
        "request's.",
        "anyOf": [
            {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
            {"const": AUTO, "type": "string"},
            {"type": "null"},
        ],
    },
    MAX_VISUAL_TOKENS: {
        "title": "Max Visual Tokens",
        "description": "Most tokens to keep of this image; wins over the request's.",
        "anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}],
    },
}
"""JSON schemas of the keys that an image part of a message may carry."""

IMAGE_PARTS = (
    "ChatCompletionContentPartImageParam",
    "CustomChatCompletionContentSimpleImageParam",
    "ResponseInputImage",
    "ResponseInputImageContentParam",
    "ResponseInputImageParam",
)
"""Names that such parts have in /openapi.json."""


class PruningOptions(BaseModel):
    """How the visual tokens are selected."""

    model_config = ConfigDict(extra="forbid", strict=True)

    query: str | None = Field(
        default=None,
        description="Text to select tokens for; replaces the question found in the messages.",
    )
    query_mode: Literal[QUERY_MODES] | None = Field(  # type: ignore[valid-type]
        default=None,
        description="Which text of the conversation the tokens are selected for: that of the "
        "image's own turn, that of the last turn, or none. Default: the server's.",
    )
    method: Literal[METHODS] | None = Field(  # type: ignore[valid-type]
        default=None,
        description="Which method selects the tokens; GET /v1/pruning lists those that fit the "
        "served model. Default: the server's.",
    )
    scope: Literal[SCOPES] | None = Field(  # type: ignore[valid-type]
        default=None,
        description="Whether a tiled image spends its budget per tile or as a whole.",
    )
    explain: bool = Field(
        default=False,
        description="Keep what was decided for a while: the response then carries `pruning.id` "
        "for GET /v1/pruning/{id}. Such a request shares no cache with others.",
    )


class PruningFields(BaseModel):
    """Mixin: the fields that vLLM's requests are extended with."""

    retention: Annotated[float, Field(gt=0, le=1)] | Literal[AUTO] | None = Field(  # type: ignore[valid-type]
        default=None,
        description="Fraction of each image's visual tokens to keep, in (0, 1]. 1.0 turns pruning "
        'off; "auto" leaves it to a server that holds a target. Absent or null: the server\'s '
        "default.",
    )
    max_visual_tokens: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="Most visual tokens to keep of each image; with `retention`, the smaller "
        "result wins.",
    )
    pruning: PruningOptions | None = Field(
        default=None, description="How the visual tokens are selected."
    )

    _wishes: PruningRequest = PrivateAttr(default_factory=PruningRequest)
    _visual_tokens: VisualTokens | None = PrivateAttr(default=None)
    _chosen: list[float] = PrivateAttr(default_factory=list)

    @model_validator(mode="wrap")
    @classmethod
    def _read_wishes(cls, data: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        # Before pydantic's own checks, whose errors name `body.retention` and no remedy.
        wishes = read_wishes(data) if isinstance(data, dict) else None
        request = validate(data)
        if wishes is not None:
            request._wishes = wishes
        return request

    @property
    def wishes(self) -> PruningRequest:
        """What this request asks of pruning, as it was checked when the body came in."""
        return self._wishes

    @property
    def wants_explanation(self) -> bool:
        """Whether the request asked for an explanation."""
        return bool(self._wishes.explanation)

    @property
    def explanation_id(self) -> str | None:
        """Id of the explanation; None while there is nothing to explain."""
        tokens = self.visual_tokens
        if not self.wants_explanation or tokens is None or not tokens.pruned_items:
            return None
        return f"{self._wishes.explanation:016x}"

    @property
    def visual_tokens(self) -> VisualTokens | None:
        """How many visual tokens this request brought and kept, once it was rendered."""
        return self._visual_tokens

    @property
    def chosen_retention(self) -> float | list[float] | None:
        """The retention that the server chose: one for all images, or one for each."""
        return self._chosen[0] if len(set(self._chosen)) == 1 else self._chosen or None

    @property
    def report(self) -> dict[str, Any]:
        """What a response says under `pruning`; empty when it says nothing."""
        report: dict[str, Any] = {"id": self.explanation_id} if self.wants_explanation else {}
        if self.chosen_retention is not None:
            report[RETENTION] = self.chosen_retention
        return report

    def rendered(self, visual_tokens: VisualTokens, chosen: Sequence[float] = ()) -> None:
        """Remember what rendering found out."""
        self._visual_tokens = visual_tokens
        self._chosen = list(chosen)


class PruningChatRequest(PruningFields, ChatCompletionRequest):
    """A chat completion request with a retention."""

    @classmethod
    def adopt(cls, stock: ChatCompletionRequest, wishes: PruningRequest | None = None) -> Self:
        """Return a request that vLLM has made or read itself, with the wishes found on it."""
        request = cls.model_construct(stock.model_fields_set, **dict(stock))
        request._wishes = wishes_of(stock) if wishes is None else wishes
        return request


class PruningResponsesRequest(PruningFields, ResponsesRequest):
    """A request to the Responses API with a retention."""


class PruningBatchRequest(PruningFields, BatchChatCompletionRequest):
    """Several conversations with one retention."""

    _conversations: list[PruningChatRequest] = PrivateAttr(default_factory=list)

    @model_validator(mode="after")
    def _check_explain(self) -> Self:
        if self.wants_explanation:
            raise VLLMValidationError(
                "pruning.explain is not available for a batch, whose conversations would share "
                "one explanation; send the conversation by itself",
                parameter="pruning.explain",
            )
        return self

    def to_chat_completion_request(self, messages: Any) -> ChatCompletionRequest:
        data = self.model_dump(exclude={"messages"}, exclude_none=True)
        request = PruningChatRequest.model_validate({**data, "messages": messages})
        self._conversations.append(request)
        return request

    @property
    def visual_tokens(self) -> VisualTokens | None:
        counts = [request.visual_tokens for request in self._conversations]
        return VisualTokens.sum(count for count in counts if count is not None)


class PruningMessagesRequest(PruningFields, AnthropicMessagesRequest):
    """A request in Anthropic's format with a retention."""

    _chat: PruningChatRequest | None = PrivateAttr(default=None)

    def become(self, chat: ChatCompletionRequest) -> PruningChatRequest:
        """Return the chat that vLLM made of this request, with its wishes."""
        self._chat = PruningChatRequest.adopt(chat, self.wishes)
        return self._chat

    @property
    def visual_tokens(self) -> VisualTokens | None:
        return None if self._chat is None else self._chat.visual_tokens


class PruningCountRequest(PruningFields, AnthropicCountTokensRequest):
    """A question for the number of tokens in Anthropic's format, with a retention."""


class ImageExplanation(BaseModel):
    """What was kept of one image, or of one tile of it; tokens are numbered row by row."""

    index: int = Field(description="Which image of the request, counted from 0.")
    tile: int = Field(description="Which tile of the image, counted from 0.")
    grid: tuple[int, int] = Field(description="Rows and columns of visual tokens.")
    frames: int = Field(description="Frames of a video, one below the other in the grid.")
    encoded: bool = Field(description="Whether the vision encoder ran; else the image was known.")
    num_tokens: int
    kept: list[int] = Field(description="Tokens that were kept, ascending.")
    groups: list[int] | None = Field(description="Group of each kept token; -1 for none.")
    all_groups: list[int] | None = Field(description="Group of every token; -1 for none.")
    sinks: list[int] | None = Field(description="Tokens found to be attention sinks.")
    scores: list[float] | None = Field(description="Score of every token.")


class Explanation(BaseModel):
    """What was kept of the images of a request; images that kept all tokens are not listed."""

    id: str
    images: list[ImageExplanation]


def read_wishes(body: Mapping[str, Any]) -> PruningRequest:
    """Check what a body says about pruning, in every place where a client may say it."""
    try:
        check_names(body, "", NAMES)
        for place in ("extra_body", "vllm_xargs"):
            if isinstance(fields := body.get(place), Mapping):
                check_names(fields, place, ())
        for name in ("messages", "input"):
            check_parts(body.get(name), name)
        wishes = PruningRequest.parse(
            body.get(RETENTION), body.get(PRUNING), body.get(MAX_VISUAL_TOKENS)
        )
    except RequestError as error:
        raise VLLMValidationError(str(error), parameter=error.parameter) from None
    alias = Settings.from_environment().retention_of_name(body.get("model"))
    return replace(wishes, alias_retention=alias)


def wishes_of(request: object) -> PruningRequest:
    """Return the wishes of any request, also of routes that do not declare the fields."""
    if isinstance(request, PruningFields):
        return request.wishes
    extra = getattr(request, "model_extra", None) or {}
    said = {name: getattr(request, name, None) for name in ("model", "messages", "vllm_xargs")}
    return read_wishes({**extra, **said})


def check_messages(body: object) -> None:
    """Check a body in Anthropic's format, whose images vLLM leaves no place for a retention."""
    if not isinstance(body, dict):
        return
    read_wishes(body)
    for where, part in content_parts(body.get("messages"), "messages"):
        for name in (RETENTION, MAX_VISUAL_TOKENS):
            if part.get(name) is None:
                continue
            raise VLLMValidationError(
                f"{where}.{name} has no effect here; put `{name}` beside `messages`, or send the "
                "request to /v1/chat/completions or /v1/responses",
                parameter=f"{where}.{name}",
            )


def refuse_pruning_fields(body: Mapping[str, Any] | None) -> None:
    """Raise the 400 of a prompt without messages; dropping the fields would go unnoticed."""
    for name in NAMES:
        if (body or {}).get(name) is not None:
            raise VLLMValidationError(
                f"{name} has no effect on a prompt without messages; leave it out, or send the "
                "request to /v1/chat/completions or /v1/responses",
                parameter=name,
            )
