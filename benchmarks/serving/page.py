"""The results of `benchmarks.serving` for readers: Markdown tables and a plot."""

from collections.abc import Iterable
from pathlib import Path

from benchmarks.serving.midsize import comparison
from benchmarks.serving.samples import PRUNING, STOCK, Results, Sample
from benchmarks.shared.estimate import Estimate
from benchmarks.shared.markers import fill_in
from benchmarks.shared.provenance import ROOT, show

DOCS = ROOT / "docs"
PAGE, PLOT = DOCS / "performance.md", DOCS / "performance.svg"


def summary(results: Results) -> str:
    """Return all values by case as Markdown, each a median over the rounds."""
    return "\n\n".join((single_requests(results), ratios(results)))


def single_requests(results: Results) -> str:
    """Return what was measured: times, throughput and tokens, with their spread."""
    rows = []
    for name, case, retention in _cases(results):
        samples, bursts = results.of(case, retention), results.bursts_of(case, retention)
        rows.append(
            [
                name,
                f"{samples[0].prompt_tokens}",
                _spread(s.ttft for s in samples),
                _spread(s.latency for s in samples),
                _spread((b.requests_per_second for b in bursts), "/s"),
                _spread(s.encoder for s in samples),
                _spread((s.selection * 1000 for s in samples), " ms")
                if any(s.selection for s in samples)
                else "",
            ]
        )
    head = ["", "KV tokens", "TTFT", "latency", "throughput", "encoder", "of it selection"]
    return table(head, rows)


def ratios(results: Results) -> str:
    """Return what matters: each retention against stock vLLM and against the limit."""
    rows = []
    stock_tokens = results.of(STOCK)[0].prompt_tokens
    for retention in results.retentions:
        samples = results.of(PRUNING, retention)
        rows.append(
            [
                f"{retention:g}",
                f"{samples[0].prompt_tokens / stock_tokens:.2f}",
                _ratio(results.against_stock(_ttft, retention)),
                _ratio(results.against_stock(_latency, retention)),
                _ratio(results.throughput_against_stock(retention)),
                _seconds(Estimate.of(results.limits(retention))),
                _ratio(results.against_limit(retention)),
            ]
        )
    head = [
        "retention",
        "KV tokens / stock",
        "TTFT / stock",
        "latency / stock",
        "throughput / stock",
        "limit of TTFT",
        "TTFT / limit",
    ]
    return table(head, rows)


def goals_table(results: Results) -> str:
    """Return the goals, what was measured, and whether that is enough."""
    rows = [
        [goal.text, goal.measured, "yes" if goal.is_met else "**no**"] for goal in results.goals()
    ]
    return table(["goal", "measured", "met"], rows)


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def section(results: Results) -> str:
    """Return the part of docs/performance.md that a run fills in."""
    source = results.source
    variables = [f"{name}={value}" for name, value in source["environment"].items()]
    options = " ".join([*variables, *source["server_options"]])
    return "\n\n".join(
        (
            f"`{source['command']}`",
            f"Model: {source['model']}; both servers: `{options}`; answers of "
            f"{source['max_tokens']} tokens; {source['concurrency']} requests at once at "
            f"saturation. Machine: {show(source)}.",
            f"![TTFT and throughput by retention]({PLOT.name})",
            summary(results),
            goals_table(results),
        )
    )


def plot(results: Results, path: Path) -> None:
    """Draw TTFT beside its limit, and throughput, by retention."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "msdg"  # the same file for the same numbers
    from matplotlib import pyplot

    retentions = results.retentions
    places = range(len(retentions))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    encoder = Estimate.of([s.encoder for s in results.of(STOCK)]).median
    limits = [Estimate.of(results.limits(r)).median for r in retentions]
    left.bar(places, [encoder] * len(limits), 0.6, color="#9ecae1", label="limit: encoder")
    left.bar(
        places,
        [limit - encoder for limit in limits],
        0.6,
        bottom=encoder,
        color="#deebf7",
        label="limit: prefill",
    )
    _errors(
        left, places, [Estimate.of(list(map(_ttft, results.of(PRUNING, r)))) for r in retentions]
    )
    stock = Estimate.of(list(map(_ttft, results.of(STOCK))))
    left.axhline(stock.median, color="#636363", linestyle="--", label="stock vLLM")
    left.set_ylabel("TTFT in s")
    rates = [
        Estimate.of([b.requests_per_second for b in results.bursts_of(PRUNING, r)])
        for r in retentions
    ]
    _errors(right, places, rates)
    stock_rate = [b.requests_per_second for b in results.bursts_of(STOCK)]
    right.axhline(
        Estimate.of(stock_rate).median, color="#636363", linestyle="--", label="stock vLLM"
    )
    right.set_ylabel("requests per s at saturation")
    for axes in (left, right):
        axes.set_xticks(list(places), [f"{r:g}" for r in retentions])
        axes.set_xlabel("retention")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def render(path: Path) -> tuple[Path, Path]:
    """Put the results at `path` into the documents; returns what was written."""
    results = Results.load(path)
    page = fill_in(PAGE.read_text(), "operations", comparison())
    PAGE.write_text(fill_in(page, "serving", section(results)))
    plot(results, PLOT)
    return PAGE, PLOT


def _errors(axes: object, places: Iterable[int], estimates: list[Estimate]) -> None:
    below = [one.median - one.low for one in estimates]
    above = [one.high - one.median for one in estimates]
    axes.errorbar(  # type: ignore[attr-defined]
        list(places),
        [one.median for one in estimates],
        yerr=[below, above],
        fmt="o-",
        color="#08519c",
        capsize=3,
        label="msdg-vllm",
    )


def _cases(results: Results) -> list[tuple[str, str, float]]:
    ours = [(f"retention {r:g}", PRUNING, r) for r in results.retentions]
    return [("stock vLLM", STOCK, 1.0), *ours]


def _ttft(sample: Sample) -> float:
    return sample.ttft


def _latency(sample: Sample) -> float:
    return sample.latency


def _spread(values: Iterable[float], unit: str = " s") -> str:
    one = Estimate.of(list(values))
    return f"{one.median:.3g}{unit} ({one.low:.3g} to {one.high:.3g})"


def _seconds(one: Estimate) -> str:
    return f"{one.median:.3g} s ({one.low:.3g} to {one.high:.3g})"


def _ratio(one: Estimate) -> str:
    return f"{one.median:.2f} ({one.low:.2f} to {one.high:.2f})"
