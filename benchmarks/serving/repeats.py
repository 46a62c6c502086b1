"""Pictures that come again: a second question, and many users who ask about few pictures."""

import json
import random
import time
from base64 import b64decode
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.serving.page import table
from benchmarks.serving.rounds import REST_SECONDS, Server
from benchmarks.serving.samples import PRUNING, STOCK
from benchmarks.shared.estimate import Estimate
from benchmarks.shared.markers import fill_in
from benchmarks.shared.pictures import picture_url
from benchmarks.shared.provenance import ROOT, show

RETENTIONS = (1.0, 0.333, 0.111)
FIRST, SECOND, TEXT = "first", "second", "text"
ONE, ZIPF = "one picture", "Zipf over 100"
GOAL_LIMIT, GOALS_AT = 0.10, (0.333, 0.111)
PAGE = ROOT / "docs" / "performance.md"

_numbers = count(1_000_000)  # of pictures: none that another benchmark of the run has sent
_questions = count(1)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, alone on its server.

    Attributes:
        round: Which round; what was asked in one round is neighbours in time.
        server: `stock` or `msdg`.
        kind: `first` and `second` question about a picture, or a `text` of the second's length.
        retention: 1.0 for stock vLLM; that of the second question for a text.
        ttft: Seconds.
        prompt_tokens: Tokens of the prompt.
        encoder: Seconds in the model's `embed_multimodal`, selection included.
        encoded: Images that the encoder ran on; only this server counts them.
    """

    round: int
    server: str
    kind: str
    retention: float
    ttft: float
    prompt_tokens: int
    encoder: float
    encoded: int


@dataclass(frozen=True, slots=True)
class Crowd:
    """Many questions at once about pictures that repeat, until all are answered."""

    round: int
    server: str
    load: str
    retention: float
    num_requests: int
    seconds: float
    encoded: int


@dataclass(frozen=True, slots=True)
class Repeats:
    """What a run measured."""

    source: dict[str, Any]
    asked: list[Asked]
    crowds: list[Crowd]
    picture_seconds: list[float]

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Repeats":
        """Read what `save` wrote."""
        data = json.loads(path.read_text())
        return cls(
            data["source"],
            [Asked(**one) for one in data["asked"]],
            [Crowd(**one) for one in data["crowds"]],
            data["picture_seconds"],
        )

    def of(self, server: str, kind: str, retention: float = 1.0) -> list[Asked]:
        """What was asked in a case, round by round."""
        wanted = (server, kind, retention)
        found = [one for one in self.asked if (one.server, one.kind, one.retention) == wanted]
        return sorted(found, key=lambda one: one.round)

    def against(self, case: Sequence[Asked], base: Sequence[Asked]) -> Estimate:
        """TTFT of a case over that of another, within rounds."""
        return Estimate.of_ratios([one.ttft for one in case], [one.ttft for one in base])

    def against_limit(self, retention: float) -> Estimate:
        """TTFT of a second question, without the handling of its picture, over that of a text."""
        seconds = Estimate.of(self.picture_seconds).median
        texts = self.of(STOCK, TEXT, retention)
        return Estimate.of_ratios(
            [one.ttft - seconds for one in self.of(PRUNING, SECOND, retention)],
            [one.ttft for one in texts],
        )


def body(server: Server, max_tokens: int, number: int, retention: float | None) -> dict[str, Any]:
    """A question that nobody asked before, about picture `number`."""
    # Of one length, so that the text of the limit is right for all.
    question = f"Question {next(_questions):05d}: what is on the left of the red square?"
    asked = server.question_body(max_tokens, picture_url(number), question)
    return asked if retention is None else {**asked, "retention": retention}


def picture_seconds(times: int = 20) -> list[float]:
    """What a server does with a picture before it knows it: read the base64 and JPEG, and hash."""
    from vllm.multimodal.hasher import MultiModalHasher

    seconds = []
    for _ in range(times):
        url = picture_url(next(_numbers))
        start = time.perf_counter()
        data = b64decode(url.partition(",")[2])
        Image.open(BytesIO(data)).convert("RGB")
        MultiModalHasher.hash_kwargs("blake3", image=data)
        seconds.append(time.perf_counter() - start)
    return seconds


class RepeatBenchmark:
    """All cases on two servers that are up."""

    def __init__(self, stock: Server, pruning: Server, max_tokens: int) -> None:
        self._servers = {STOCK: stock, PRUNING: pruning}
        self._max_tokens = max_tokens
        self.asked: list[Asked] = []
        self.crowds: list[Crowd] = []

    def single_round(self, number: int) -> Iterator[str]:
        """Ask twice about a new picture in every case, and once a text as long."""
        cases = [(STOCK, 1.0), *((PRUNING, retention) for retention in RETENTIONS)]
        lengths = {}
        for server, retention in cases if number % 2 else cases[::-1]:
            time.sleep(REST_SECONDS)
            picture = next(_numbers)
            wanted = retention if server == PRUNING else None
            for kind in (FIRST, SECOND):
                asked = body(self._servers[server], self._max_tokens, picture, wanted)
                lengths[retention] = self._ask(number, server, kind, retention, asked)
                yield f"{server} {kind} {retention:g}"
        time.sleep(REST_SECONDS)
        stock = self._servers[STOCK]
        for retention in RETENTIONS:
            asked = stock.text_body(self._max_tokens, lengths[retention])
            self._ask(number, STOCK, TEXT, retention, asked)
            yield f"{TEXT} {retention:g}"

    def _ask(
        self, number: int, name: str, kind: str, retention: float, asked: dict[str, Any]
    ) -> int:
        server = self._servers[name]
        server.encoder_seconds()
        before = self._encoded(name)
        answer = server.client.ask(asked)
        encoder = server.encoder_seconds()
        encoded = self._encoded(name) - before
        tokens = answer.prompt_tokens
        self.asked.append(
            Asked(number, name, kind, retention, answer.ttft, tokens, encoder, encoded)
        )
        return tokens

    def _encoded(self, name: str) -> int:
        """Images that the encoder ran on; of the worker, because a page of metrics may be old."""
        if name == STOCK:
            return 0
        counts: dict[str, int] = self._servers[name].client.call_workers("msdg_statistics")
        return counts["encoder_images"]

    def crowd_round(self, number: int, concurrency: int, num_requests: int) -> Iterator[str]:
        """Saturate the servers with questions about one picture, and about a hundred by Zipf."""
        cases = [(STOCK, 1.0), *((PRUNING, retention) for retention in RETENTIONS)]
        for load in (ONE, ZIPF):
            for server, retention in cases if number % 2 else cases[::-1]:
                time.sleep(REST_SECONDS)
                self._crowd(number, server, load, retention, concurrency, num_requests)
                yield f"{server} {load} {retention:g}"

    def _crowd(
        self,
        number: int,
        name: str,
        load: str,
        retention: float,
        concurrency: int,
        num_requests: int,
    ) -> None:
        server = self._servers[name]
        # The same order of pictures in all cases of a round, and no picture of another case.
        chance, first = random.Random(number), next(_numbers) * 1000
        places = (
            [0] * num_requests
            if load == ONE
            else chance.choices(range(100), [1 / rank for rank in range(1, 101)], k=num_requests)
        )
        wanted = retention if name == PRUNING else None
        bodies = [body(server, self._max_tokens, first + place, wanted) for place in places]
        before = self._encoded(name)
        start = time.perf_counter()
        with ThreadPoolExecutor(concurrency) as pool:
            list(pool.map(server.client.ask, bodies))
        seconds = time.perf_counter() - start
        encoded = self._encoded(name) - before
        self.crowds.append(Crowd(number, name, load, retention, num_requests, seconds, encoded))


def summary(results: Repeats) -> str:
    """Return tables of all cases, and whether the goals are met."""
    return "\n\n".join((_questions_table(results), _crowds_table(results), _goals(results)))


def _questions_table(results: Repeats) -> str:
    rows = []
    for name, server, retention in _cases():
        first, second = (results.of(server, kind, retention) for kind in (FIRST, SECOND))
        texts = results.of(STOCK, TEXT, retention)
        stock = results.of(STOCK, SECOND)
        rows.append(
            [
                name,
                str(second[0].prompt_tokens),
                _seconds(first),
                _seconds(second),
                f"{Estimate.of([one.encoder for one in second]).median:.3g} s",
                "" if server == STOCK else str(sum(one.encoded for one in second)),
                _seconds(texts),
                _ratio(results.against(second, texts)),
                _ratio(results.against(second, stock)),
            ]
        )
    head = [
        "",
        "prompt tokens",
        "TTFT, first question",
        "TTFT, second question",
        "encoder and selection",
        "encoder runs",
        "TTFT, text as long",
        "second / text",
        "second / stock's second",
    ]
    return table(head, rows)


def _crowds_table(results: Repeats) -> str:
    rows = []
    for name, server, retention in _cases():
        row = [name]
        for load in (ONE, ZIPF):
            crowds = [
                one
                for one in results.crowds
                if (one.server, one.load, one.retention) == (server, load, retention)
            ]
            rates = Estimate.of([one.num_requests / one.seconds for one in crowds])
            row.append(f"{rates.median:.3g}/s")
            asked = sum(one.num_requests for one in crowds)
            encoded = sum(one.encoded for one in crowds)
            row.append("" if server == STOCK or retention == 1.0 else f"{encoded} of {asked}")
        rows.append(row)
    return table(["", ONE, "images encoded", ZIPF, "images encoded"], rows)


def _goals(results: Repeats) -> str:
    seconds = Estimate.of(results.picture_seconds).median
    rows = []
    for retention in GOALS_AT:
        over = results.against_limit(retention)
        rows.append(
            [
                f"second question at {retention:g}: TTFT within {GOAL_LIMIT:.0%} of the text, "
                f"without {seconds * 1000:.1f} ms to read and hash the picture",
                f"{over.median - 1:+.1%} ({over.low - 1:+.1%} to {over.high - 1:+.1%})",
                "yes" if over.median <= 1 + GOAL_LIMIT else "**no**",
            ]
        )
        runs = sum(one.encoded for one in results.of(PRUNING, SECOND, retention))
        goal = f"second question at {retention:g}: no encoder run"
        rows.append([goal, str(runs), "**no**" if runs else "yes"])
    return table(["goal", "measured", "met"], rows)


def _cases() -> list[tuple[str, str, float]]:
    ours = [(f"retention {retention:g}", PRUNING, retention) for retention in RETENTIONS]
    return [("stock vLLM", STOCK, 1.0), *ours]


def _seconds(asked: Sequence[Asked]) -> str:
    one = Estimate.of([each.ttft for each in asked])
    return f"{one.median:.3g} s ({one.low:.3g} to {one.high:.3g})"


def _ratio(one: Estimate) -> str:
    return f"{one.median:.2f} ({one.low:.2f} to {one.high:.2f})"


def render(path: Path) -> Path:
    """Put the results at `path` into the page; returns it."""
    results = Repeats.load(path)
    source = results.source
    section = "\n\n".join(
        (
            f"`{source['command']}`",
            f"Model: {source['model']}; {source['rounds']} rounds; {source['concurrency']} at once "
            f"at saturation, {source['requests']} requests per case. Machine: {show(source)}.",
            summary(results),
        )
    )
    PAGE.write_text(fill_in(PAGE.read_text(), "repeats", section))
    return PAGE
