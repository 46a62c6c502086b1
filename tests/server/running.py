"""A real server as a subprocess on loopback, and what a client sends to it."""

from __future__ import annotations

import base64
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import openai
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.shared.server_process import running
from server.metrics import REFRESH_SECONDS

MODEL = "tiny-llava"
MAX_MODEL_LEN = 2048
MAX_IMAGES = 4
START_SECONDS = 400
OPTIONS = (
    "--served-model-name",
    MODEL,
    "--dtype=float32",
    "--enforce-eager",
    f"--max-model-len={MAX_MODEL_LEN}",
    "--max-num-seqs=16",
    f'--limit-mm-per-prompt={{"image": {MAX_IMAGES}}}',
    "--enable-prompt-tokens-details",
    # 16 tokens of KV per block would be the default on a GPU; a CPU takes multiples of 32.
    "--block-size=32",
)
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True, slots=True)
class Server:
    """A running server."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    key: str = "none"

    @property
    def client(self) -> openai.OpenAI:
        """The official client, without retries that would hide a failure."""
        base_url = f"{self.url}/v1"
        return openai.OpenAI(base_url=base_url, api_key=self.key, max_retries=0, timeout=120)

    @property
    def authorization(self) -> dict[str, str]:
        """The header that carries the key."""
        return {"Authorization": f"Bearer {self.key}"}

    def get(self, path: str) -> httpx.Response:
        """Fetch a path."""
        return httpx.get(self.url + path, headers=self.authorization, timeout=60)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """Send a body as JSON, or as it is when it is text."""
        content = {"content": body} if isinstance(body, str) else {"json": body}
        headers = {"Content-Type": "application/json", **self.authorization}
        return httpx.post(self.url + path, headers=headers, timeout=120, **content, **options)

    def metrics(self) -> dict[str, float]:
        """All samples of /metrics by their name and labels, none older than this call."""
        # A page lives for a second, with several processes for one more.
        time.sleep(2 * REFRESH_SECONDS)
        samples = {}
        for line in self.get("/metrics").text.splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                samples[name] = float(value)
        return samples


@contextmanager
def running_server(
    folder: Path,
    log: Path,
    *options: str,
    module: str = "server",
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Start a server, wait until it is healthy, stop it at the end."""
    extra = dict(environment or {})
    command = ["--model", str(folder), *OPTIONS, *options]
    with running(module, command, log, ENVIRONMENT | extra, START_SECONDS) as started:
        yield Server(started.url, started.process, log, extra.get("VLLM_API_KEY", "none"))


def shown_metrics(server: Server) -> list[str]:
    """Names of our metrics at /metrics, as docs/metrics.md writes them."""
    return sorted(
        family.name + ("_total" if family.type == "counter" else "")
        for family in text_string_to_metric_families(server.get("/metrics").text)
        if family.name.startswith("msdg_") and not family.name.endswith("_created")
    )


def data_url(picture: Image.Image | bytes, kind: str = "png") -> str:
    """A picture, or any bytes that pretend to be one, as a data URL."""
    if isinstance(picture, Image.Image):
        with BytesIO() as file:
            picture.save(file, kind.upper())
            picture = file.getvalue()
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"


def image_part(picture: Image.Image | bytes | str, **extra: Any) -> dict[str, Any]:
    """An image content part of a chat message."""
    url = picture if isinstance(picture, str) else data_url(picture)
    return {"type": "image_url", "image_url": {"url": url}, **extra}


def user(text: str, *parts: dict[str, Any]) -> dict[str, Any]:
    """A user message: images, then text."""
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def chat_body(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A greedy chat request."""
    body = {"model": MODEL, "messages": list(messages), "temperature": 0, "max_tokens": 4}
    return {**body, **fields}
