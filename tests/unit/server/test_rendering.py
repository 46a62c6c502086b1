"""A request's wishes reach the renderer as one value, and its errors name the body's field."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest
from vllm.exceptions import VLLMValidationError
from vllm.renderers import ChatParams

from msdg_vllm.core.errors import RequestError
from msdg_vllm.request import PruningRequest
from server.rendering import _as_bad_request, _build_with_wishes
from server.schemas import PruningChatRequest, PruningResponsesRequest

MESSAGES = [{"role": "user", "content": "hi"}]


def test_an_error_names_the_field_as_the_body_has_it() -> None:
    for wishes, named in (
        ({"pruning": {"method": "no"}}, "pruning.method"),
        ({"retention": 0}, "retention"),
    ):
        with pytest.raises(RequestError) as caught:
            PruningRequest.parse(**wishes)
        error = _as_bad_request(caught.value, None)
        assert isinstance(error, VLLMValidationError)
        assert error.parameter == named


def test_a_template_without_videos_is_the_clients_to_know() -> None:
    fault = AssertionError("Failed to apply prompt replacement for mm_items['video'][0]")
    error = _as_bad_request(fault, None)
    assert isinstance(error, VLLMValidationError)
    assert "chat template has no place" in str(error)
    other = AssertionError("anything else")
    assert _as_bad_request(other, None) is other


def params_of(request: Any) -> ChatParams:
    params: ChatParams = _build_with_wishes(type(request).build_chat_params, request, None, "auto")
    return params


@pytest.mark.parametrize(
    ("request_class", "body"),
    [
        (PruningChatRequest, {"messages": MESSAGES}),
        (PruningResponsesRequest, {"input": "hi"}),
        (ChatCompletionRequest, {"messages": MESSAGES}),
        (TokenizeChatRequest, {"messages": MESSAGES}),
    ],
)
def test_wishes_travel_as_one_value_behind_the_check_of_processor_kwargs(
    request_class: Any, body: dict[str, Any]
) -> None:
    body = {**body, "retention": 0.5, "pruning": {"method": "random"}}
    request = request_class.model_validate(body)
    wishes = PruningRequest(retention=0.5, method="random")
    assert params_of(request).mm_processor_kwargs == {"pruning": wishes}
    assert getattr(request, "mm_processor_kwargs", None) is None


def test_a_request_without_wishes_builds_stock_parameters() -> None:
    request = PruningChatRequest.model_validate({"messages": MESSAGES})
    assert params_of(request) == ChatCompletionRequest.build_chat_params(request, None, "auto")
