"""The running server: whether it is the one a table needs, and how long its requests took."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

import httpx

from benchmarks.paper.errors import ServerError
from benchmarks.paper.published import Table
from msdg_vllm.core.profiles import EncoderProfile

# What the paper calls inference and prefilling time, in vLLM's histograms.
_HISTOGRAMS = {
    "inference": "vllm:e2e_request_latency_seconds",
    "prefill": "vllm:request_prefill_time_seconds",
}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server that answered.

    Attributes:
        model: The name to put into requests.
        names: All names by which its checkpoint is known.
    """

    url: str
    model: str
    names: tuple[str, ...]
    architecture: str
    version: str
    methods: tuple[str, ...]
    profile: EncoderProfile

    @classmethod
    def at(cls, url: str) -> "Endpoint":
        """Ask the server at `url` what it is, or raise a `ServerError`."""
        url = url.rstrip("/").removesuffix("/v1")
        models = _get(url, "/v1/models").json()["data"]
        described = _get(url, "/v1/pruning").json()
        named = [model for model in models if model["id"] == described["model"]]
        return cls(
            url=url,
            model=described["model"],
            names=tuple(str(model[key]) for model in named for key in ("id", "root")),
            architecture=described["architecture"],
            version=described["version"],
            methods=tuple(described["methods"]),
            profile=EncoderProfile(**described["encoder"]["profile"]),
        )

    def check(self, table: Table, row: str) -> None:
        """Raise a `ServerError` unless this server can measure `row` of `table`."""
        if self.architecture != table.architecture or not self._is(table.model):
            raise ServerError(
                f"{table.name} is measured on {table.model}, but {self.url} serves {self.model} "
                f"({self.architecture}); start `python -m server --model {table.model}`. "
                f"If it is that checkpoint under another name, add "
                f"`--served-model-name {table.model}`"
            )
        setting = table.served[row]
        if setting.method not in self.methods:
            raise ServerError(
                f"{row} needs the method {setting.method!r}, but the server offers "
                f"{', '.join(self.methods)}"
            )
        wanted = table.profile_of(row)
        if wanted is not None and wanted != self.profile:
            raise ServerError(
                f"{row} of {table.name} needs a server with another encoder profile. Save this as "
                f"a file and start the server with `--profile FILE`:\n{wanted.to_json()}"
                f"It has: {self.profile}"
            )

    def _is(self, model: str) -> bool:
        """Whether a name of the checkpoint ends like `model`: hub names, folders and caches do."""
        wanted = model.split("/")[-1].lower()
        return any(name.rstrip("/").split("/")[-1].lower() == wanted for name in self.names)

    def times(self) -> dict[str, tuple[float, float]]:
        """Return seconds and number of requests so far, by the paper's names of the times."""
        text = _get(self.url, "/metrics").text
        return {
            kind: (_sample(text, f"{name}_sum"), _sample(text, f"{name}_count"))
            for kind, name in _HISTOGRAMS.items()
        }


def mean_milliseconds(
    before: Mapping[str, tuple[float, float]], after: Mapping[str, tuple[float, float]]
) -> dict[str, float]:
    """Return the mean time of the requests between two readings of `Endpoint.times`."""
    means = {}
    for kind, (seconds, count) in after.items():
        requests = count - before[kind][1]
        if requests <= 0:
            raise ServerError("the server's /metrics counted no request during the measurement")
        means[kind] = 1000 * (seconds - before[kind][0]) / requests
    return means


def _sample(text: str, name: str) -> float:
    """Return the sum of a metric's samples over its labels."""
    lines = (line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} ")))
    values = [float(line.rsplit(" ", 1)[1]) for line in lines]
    if not values:
        raise ServerError(f"the server's /metrics has no {name}; is it vLLM 0.32?")
    return sum(values)


def _get(url: str, path: str) -> httpx.Response:
    key = os.environ.get("VLLM_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        response = httpx.get(url + path, headers=headers, timeout=30)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerError(
            f"no server at {url} ({error}); start one with `python -m server --model ...` and "
            "name it with --server"
        ) from error
    if response.status_code == 401:
        raise ServerError(f"{url} wants an API key: put it into the variable VLLM_API_KEY")
    if response.status_code == 404 and path == "/v1/pruning":
        raise ServerError(
            f"{url} is a server without pruning; start it with `python -m server`, or with "
            "VLLM_PLUGINS=msdg"
        )
    if response.is_error:
        raise ServerError(f"{url}{path} answered {response.status_code}: {response.text[:200]}")
    return response
