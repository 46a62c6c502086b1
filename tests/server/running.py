"""A real server as a subprocess on loopback, and what a client sends to it."""

from __future__ import annotations

import base64
import os
import signal
import socket
import subprocess
import sys
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

MODEL = "tiny-llava"
MAX_MODEL_LEN = 2048
MAX_IMAGES = 4
START_SECONDS = 400
ROOT = Path(__file__).resolve().parents[2]
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
        """All samples of /metrics by their name and labels."""
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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", module, "--model", str(folder), "--host=127.0.0.1"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, f"--port={port}", *OPTIONS, *options],
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT, **(environment or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
            # A group of its own, so that nothing of it outlives the test.
            start_new_session=True,
        )
        try:
            _await_health(url, process, log)
            yield Server(url, process, log, (environment or {}).get("VLLM_API_KEY", "none"))
        finally:
            _stop(process)


def _await_health(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-60:])
    raise AssertionError(f"the server did not start; the end of its log:\n{tail}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


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
