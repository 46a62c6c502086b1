"""`/`: a small page that says what this address is and where to go on."""

from __future__ import annotations

from html import escape

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

import msdg_vllm
from server import playground

PATH = "/"
_PLACES = {
    playground.PATH: "try it: what is kept of a picture",
    "/docs": "every route and field",
    "/v1/models": "what is served",
    "/v1/pruning": "what is on: profile, methods, defaults",
    "/metrics": "for Prometheus",
}

router = APIRouter(include_in_schema=False)


@router.get(PATH)
async def show_front_page(raw_request: Request) -> HTMLResponse:
    """Return links to those of the places that this server has."""
    present = {getattr(route, "path", None) for route in raw_request.app.routes}
    items = "".join(
        f'<li><a href="{path[1:]}">{path}</a> {escape(what)}</li>'
        for path, what in _PLACES.items()
        if path in present
    )
    title = f"msdg-vllm {msdg_vllm.__version__}"
    return HTMLResponse(
        f"<!doctype html><html lang=en><title>{title}</title><h1>{title}</h1>"
        f"<p>An OpenAI-compatible server; clients use /v1.</p><ul>{items}</ul></html>\n"
    )
