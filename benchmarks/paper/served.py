"""The running server: whether it is the one a table needs, and how long its requests took."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.paper.published import Table
from benchmarks.shared.client import Client, ServerError
from msdg_vllm.core.profiles import EncoderProfile

_PAGE_SECONDS = 2
"""How old a page of /metrics may be: a second, with several API processes one more."""

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
        client = Client(url)
        described = client.description()
        named = [model for model in client.models() if model["id"] == described["model"]]
        return cls(
            url=client.url,
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
        time.sleep(_PAGE_SECONDS)
        return {
            kind: (self._sample(f"{name}_sum"), self._sample(f"{name}_count"))
            for kind, name in _HISTOGRAMS.items()
        }

    def _sample(self, name: str) -> float:
        value = Client(self.url).metric(name)
        if value is None:
            raise ServerError(f"the server's /metrics has no {name}; is it vLLM 0.32?")
        return value


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
