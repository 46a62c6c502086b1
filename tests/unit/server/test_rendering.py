"""Errors of a request become the 400 that names its field."""

from __future__ import annotations

import pytest
from vllm.exceptions import VLLMValidationError

from msdg_vllm.core.errors import RequestError
from server.rendering import _as_bad_request


@pytest.mark.parametrize(
    ("parameter", "named"), [("method", "pruning.method"), ("retention", "retention")]
)
def test_an_error_names_the_field_as_the_body_has_it(parameter: str, named: str) -> None:
    error = _as_bad_request(RequestError("no", parameter=parameter), None)
    assert isinstance(error, VLLMValidationError)
    assert error.parameter == named
