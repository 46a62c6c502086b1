"""The report: one HTML page that needs no network, for a person to read."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import numpy as np

from msdg_vllm.calibration.coverage import DIVPRUNE, MEASURES, RANDOM, RETENTIONS
from msdg_vllm.calibration.directions import direction_name
from msdg_vllm.calibration.findings import position_share
from msdg_vllm.calibration.looking import Record
from msdg_vllm.calibration.plots import (
    BLUE,
    GREEN,
    ORANGE,
    Chart,
    Line,
    histogram_svg,
    kept_png,
    map_png,
    picture_tag,
)
from msdg_vllm.calibration.run import Calibration
from msdg_vllm.calibration.window import CUE_NAMES, Curve

_STYLE = """
:root{--ink:#111827;--soft:#4b5563;--line:#e5e7eb;--paper:#fff;--tint:#f3f4f6}
@media(prefers-color-scheme:dark){:root{--ink:#e5e7eb;--soft:#9ca3af;--line:#374151;--paper:#111827;
--tint:#1f2937}}
body{font:16px/1.55 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:60rem;
margin:2rem auto;padding:0 1rem}
h1{font-size:1.6rem;margin-bottom:.2rem}h2{font-size:1.2rem;margin-top:2.4rem}
p.sub,figcaption,small{color:var(--soft)}figure{margin:1rem 0}svg{width:100%;height:auto}
svg text{font-size:11px;fill:var(--soft)}svg .axis{font-size:12px}.rule{stroke:var(--line)}
figcaption span{margin-left:1rem;white-space:nowrap}
figcaption i{display:inline-block;width:.8rem;height:.25rem;margin-right:.3rem;
vertical-align:middle}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;margin:1rem 0}
th,td{padding:.3rem .5rem;border-bottom:1px solid var(--line);text-align:right}
th:first-child,td:first-child{text-align:left}tr.chosen{background:var(--tint);font-weight:600}
.box{background:var(--tint);border-radius:.5rem;padding:.8rem 1.2rem;margin:1rem 0}
.warn{border-left:4px solid #d97706}.scroll{overflow-x:auto}
.maps{display:flex;gap:.25rem;margin:.4rem 0}.maps div{text-align:center;font-size:.7rem;
color:var(--soft)}.maps img{height:5.2rem;image-rendering:pixelated;border-radius:.2rem;
display:block}
.pair{display:grid;grid-template-columns:repeat(auto-fill,minmax(18rem,1fr));gap:1rem}
.pair div{display:flex;gap:.3rem}.pair img{width:50%;border-radius:.3rem;align-self:start}
pre{background:var(--tint);padding:1rem;border-radius:.5rem;overflow-x:auto;font-size:.8rem}
"""


def write_report(calibration: Calibration, path: Path) -> None:
    """Write the page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(render(calibration), encoding="utf-8")
    draft.replace(path)


def render(calibration: Calibration) -> str:
    """Return the page."""
    info, images = calibration.info, calibration.images
    parts = [
        f"<h1>{escape(info.name)}</h1>",
        f'<p class="sub">{escape(info.model_type)}, {info.num_layers} layers, width {info.width}; '
        f"{images['used']} images, {images['annotated']} with masks, "
        f"{images['unreadable']} unreadable</p>",
        _summary(calibration),
        _sinks(calibration),
        _window(calibration),
        _maps(calibration),
        _directions(calibration),
        _coverage(calibration),
        _kept(calibration),
        f"<h2>The profile</h2><pre>{escape(calibration.profile.to_json())}</pre>",
    ]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>Calibration of {escape(info.name)}</title><style>{_STYLE}</style>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def next_steps(calibration: Calibration) -> list[str]:
    """Return what a user should try next."""
    profile, window = calibration.profile, calibration.window
    steps = []
    if window.recall is None:
        steps.append("Give masks: they validate the window and show whether the method pays.")
    if calibration.images["used"] < 200:
        steps.append("Use 200 images like those that will be served.")
    if profile.saliency_window is None:
        steps.append(
            "Without saliency only groups and the question decide; compare with `divprune`."
        )
    checks, row = calibration.checks, calibration.settled.row
    for name, advice in ((DIVPRUNE, "serve with `divprune`"), (RANDOM, "use another method")):
        more = checks.gain(name, row)
        if more is not None and more.low[0] > 0:
            steps.append(
                f"{name} covers {more.mean[0]:.1%} more than this profile (at least "
                f"{more.low[0]:.1%}): {advice}, or compare both on your own task."
            )
    ap = {name: curve.mean[0] for name, curve in calibration.checks.ap.items()}
    directions = {name: value for name, value in ap.items() if name.startswith("direction")}
    if directions:
        best = max(directions, key=lambda name: directions[name])
        early = int(best.split()[1])
        used = directions.get(direction_name(profile.direction_layers[0], calibration.info), 0.0)
        if early != profile.direction_layers[0] and directions[best] > used + 0.02:
            steps.append(
                f'Try "direction_layers": [{early}, {calibration.info.direction_end}]: its AP is '
                f"{directions[best]:.3f} against {used:.3f}."
            )
    steps.append("Serve with the profile and measure your own task at two or three retentions.")
    return steps


def _summary(calibration: Calibration) -> str:
    profile, window = calibration.profile, calibration.window
    sinks = "no sinks"
    if profile.sink_layer is not None:
        sinks = (
            f"sinks after layer {profile.sink_layer}, coordinate {profile.sink_coordinate}, "
            f"threshold {profile.sink_threshold:g}"
        )
    saliency = "saliency off"
    if profile.saliency_window is not None:
        first, last = profile.saliency_window
        saliency = f"saliency window {first} → {last}, scale {profile.saliency_scale:g}"
    grouping = "directions" if profile.grouping == "direction" else "output features"
    validated = "checked with masks" if window.recall is not None else "not validated: no masks"
    chosen = (
        f"<b>{sinks}; {saliency}; {profile.num_groups} groups of {grouping}.</b> Confidence "
        f"{window.confidence}, {validated}."
    )
    warnings = ""
    if calibration.warnings:
        warnings = f'<div class="box warn"><b>Mind</b>{_list(calibration.warnings)}</div>'
    return (
        f'<h2>What was chosen</h2><div class="box">{chosen}</div>{warnings}'
        f"<b>What to try next</b>{_list(next_steps(calibration))}"
    )


def _sinks(calibration: Calibration) -> str:
    sinks = calibration.sinks
    bands = []
    if sinks.stage is not None:
        bands.append((*sinks.stage, "sink stage", ORANGE))
    chart = Chart(
        [Line("largest / median update", sinks.ratios.tolist(), ORANGE)],
        "layer",
        "Mean over images of the largest update by the median one.",
        bands=bands,
    )
    histogram = ""
    values = [r["sink_values"] for r in calibration.checks.records if "sink_values" in r]
    if values and calibration.profile.sink_layer is not None:
        histogram = histogram_svg(
            np.concatenate(values),
            calibration.profile.sink_threshold,
            f"absolute value at coordinate {calibration.profile.sink_coordinate}",
        )
    return f"<h2>Sinks: {sinks.verdict}</h2>{_list(sinks.reasons)}{chart.svg()}{histogram}"


def _window(calibration: Calibration) -> str:
    window, width = calibration.window, calibration.width
    verdict = "off" if window.chosen is None else f"{window.chosen[0]} → {window.chosen[1]}"
    names = {"paper": "the paper's rule", "scan": "masks", "vote": "a vote of cues", "off": "—"}
    parts = [
        f"<h2>Saliency window: {verdict} <small>({names[window.source]})</small></h2>",
        _list((*window.reasons, *calibration.settled.reasons)),
    ]
    stage = calibration.sinks.stage
    layer_bands = [] if stage is None else [(*stage, "sink stage", ORANGE)]
    if window.chosen is not None:
        layer_bands.append((window.chosen[0], window.chosen[1] - 1, "window", GREEN))
    if window.layer_recall is not None and window.recall is not None:
        levels = {"random": window.chance}
        if window.centre is not None:
            levels["centre of the image"] = window.centre
        chart = Chart(
            [_line("recall", window.layer_recall)],
            "layer",
            "Foreground recall of the 30 % of tokens that a single layer moves most.",
            levels,
            layer_bands,
            percent=True,
        )
        parts.append(chart.svg())
        parts.append(
            _by_window("Foreground recall", [_line("recall", window.recall)], calibration, levels)
        )
    colors = dict(zip(CUE_NAMES, (BLUE, ORANGE, GREEN), strict=True))
    lines = [_line(CUE_NAMES[name], cue, colors[name]) for name, cue in window.cues.items()]
    parts.append(_by_window("Cues that need no masks.", lines, calibration, {}))
    shares = position_share(calibration.records).tolist()
    parts.append(
        _by_window(
            "How much of u position alone explains.", [Line("share", shares)], calibration, {}
        )
    )
    parts.append(f"<p><small>Windows have {width} updates; bars are 95 % intervals.</small></p>")
    return "".join(parts)


def _by_window(
    label: str, lines: Sequence[Line], calibration: Calibration, levels: dict[str, float]
) -> str:
    width, chosen = calibration.width, calibration.window.chosen
    count = len(lines[0].values)
    return Chart(
        lines,
        "window",
        label,
        levels,
        [] if chosen is None else [(chosen[0], chosen[0], "chosen", GREEN)],
        [f"{n}→{n + width}" for n in range(count)],
        percent=bool(levels),
    ).svg()


def _line(label: str, curve: Curve, color: str = BLUE) -> Line:
    return Line(label, curve.mean.tolist(), color, curve.low.tolist(), curve.high.tolist())


def _maps(calibration: Calibration) -> str:
    rows = []
    for record in _shown(calibration):
        cells = [_cell("image", picture_tag(record["view"].tobytes(), "image"))]
        for layer, values in enumerate(record["maps"]):
            title = f"{layer}→{layer + 1}"
            cells.append(_cell(title, picture_tag(map_png(values), title)))
        if "window_map" in record:
            cells.append(_cell("window", picture_tag(map_png(record["window_map"]), "window")))
        rows.append(f'<div class="maps">{"".join(cells)}</div>')
    return (
        "<h2>What each layer moves</h2><p>Bright tokens move most. In a good window they lie on "
        f'what the image shows.</p><div class="scroll">{"".join(rows)}</div>'
    )


def _kept(calibration: Calibration) -> str:
    pairs = []
    for record in _shown(calibration):
        view = record["view"].tobytes()
        kept = picture_tag(kept_png(view, record["kept"]), "kept tokens")
        pairs.append(f"<div>{picture_tag(view, 'image')}{kept}</div>")
    return (
        "<h2>What is kept at 1/9</h2><p>Without a question, by the profile as the first look "
        f'suggests it.</p><div class="pair">{"".join(pairs)}</div>'
    )


def _directions(calibration: Calibration) -> str:
    ap = calibration.checks.ap
    if not ap:
        return ""
    used = f"direction {calibration.profile.direction_layers[0]} →"
    rows = [
        _row(
            [name, f"{c.mean[0]:.3f}", f"{c.low[0]:.3f} to {c.high[0]:.3f}"],
            name.startswith(used)
            if calibration.profile.grouping == "direction"
            else name == "output features",
        )
        for name, c in ap.items()
    ]
    return (
        "<h2>Directions or output features?</h2><p>Average precision of finding tokens of the same "
        f"class, over {calibration.checks.anchors} anchors; the paper's protocol.</p><table><tr>"
        f"<th>representation</th><th>AP</th><th>95 % interval</th></tr>{''.join(rows)}</table>"
    )


def _coverage(calibration: Calibration) -> str:
    coverage = calibration.checks.coverage
    if not coverage:
        return ""
    head = "".join(f"<th>{retention}</th>" for retention in RETENTIONS)
    rows = []
    for name, curve in coverage.items():
        cells = curve.mean.reshape(len(RETENTIONS), len(MEASURES))
        widths = (curve.high - curve.low).reshape(cells.shape) / 2
        texts = [
            f'<span title="± {100 * width.max():.1f}">{_per_cent(row)}</span>'
            for row, width in zip(cells, widths, strict=True)
        ]
        rows.append(_row([escape(name), *texts], name == calibration.settled.row))
    return (
        f"<h2>Is it worth it?</h2><p>What the kept tokens still show without a question: "
        f"{', '.join(MEASURES)}, in per cent, on {len(calibration.checks.records)} images. The "
        "marked row is the profile that was written. If it is not above random, equal shares and "
        "DivPrune, this method does not pay on this encoder.</p>"
        f"<table><tr><th>way of choosing</th>{head}</tr>{''.join(rows)}</table>"
    )


def _per_cent(values: Iterable[float]) -> str:
    return " / ".join(f"{100 * value:.0f}" for value in values)


def _row(cells: Sequence[str], is_chosen: bool) -> str:
    tag = '<tr class="chosen">' if is_chosen else "<tr>"
    return tag + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _cell(title: str, picture: str) -> str:
    return f"<div>{picture}{title}</div>"


def _shown(calibration: Calibration) -> Iterable[Record]:
    return (record for record in calibration.checks.records if "view" in record)


def _list(items: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"
