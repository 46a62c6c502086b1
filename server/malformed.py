"""Bodies that break what reads them: a client's mistake, and so a 400.

vLLM answers them with a 500: its checks expect mappings where a client may send anything, and
Python's JSON parser gives up on deep nesting.
"""

from __future__ import annotations

from http import HTTPStatus
from traceback import walk_tb

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse
from vllm.entrypoints.serve.exception_handling.handlers.exception import exception_handler

_SHAPE_ERRORS = (AttributeError, KeyError, IndexError)
# Reads the types of content parts, which may be null.
_READER = "_get_message_types"


def install(app: FastAPI) -> None:
    """Answer malformed bodies with a 400, and all other faults as vLLM does."""
    app.exception_handler(RecursionError)(_refuse_depth)
    for error in _SHAPE_ERRORS:
        app.exception_handler(error)(_refuse_shape)


async def _refuse_depth(_: Request, error: Exception) -> JSONResponse:
    return _refusal("the JSON of the request is nested too deeply; send a flatter one")


async def _refuse_shape(request: Request, error: Exception) -> JSONResponse:
    if not _comes_from_protocol(error):
        answer: JSONResponse = await exception_handler(request, error)
        return answer
    return _refusal(
        f"a field of the request has another shape than it should: {error}; compare the body "
        "with the description of this route"
    )


def _comes_from_protocol(error: Exception) -> bool:
    """Whether an error was raised while vLLM checked a body, or read the types of its parts."""
    *_, (last, _) = walk_tb(error.__traceback__)
    name = str(last.f_globals.get("__name__"))
    return name.startswith("vllm.entrypoints.") and (
        name.endswith(".protocol") or last.f_code.co_name == _READER
    )


def _refusal(message: str) -> JSONResponse:
    status = HTTPStatus.BAD_REQUEST
    error = {"message": message, "type": status.phrase, "param": None, "code": status}
    return JSONResponse({"error": error}, status)
