"""`/playground`: a page that shows what is kept of an image, made of public routes only."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, HTTPException, Response
from fastapi.responses import FileResponse

PATH = "/playground"
_PAGE = Path(__file__).parent / "page"
_FILES = {path.relative_to(_PAGE).as_posix(): path for path in _PAGE.rglob("*") if path.is_file()}
# Nothing from elsewhere and nothing inline. Pictures come as data: URLs from the person's own disk.
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_TYPES = {".js": "text/javascript", ".svg": "image/svg+xml"}

router = APIRouter(include_in_schema=False)


@router.get(PATH)
async def show_page() -> Response:
    """Return the page itself."""
    return FileResponse(_FILES["index.html"], headers=_HEADERS)


@router.get(PATH + "/{name:path}")
async def show_file(name: str) -> Response:
    """Return a script, a style or an example of the page."""
    if (path := _FILES.get(name)) is None:
        raise HTTPException(404, f"the playground has no file {name!r}; open {PATH}")
    return FileResponse(path, headers=_HEADERS, media_type=_TYPES.get(path.suffix))
