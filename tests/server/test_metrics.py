"""Prometheus metrics: what a few known requests add."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.deployment import not_shown
from tests.documents import documented_metrics
from tests.pictures import picture_of
from tests.server.running import MODEL, Server, chat_body, image_part, shown_metrics, user

LABEL = f'model_name="{MODEL}"'
FIRST_TOKEN = "msdg_time_to_first_token_seconds"
QUESTION = "How many green stars are there?"


def added(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What changed among our metrics."""
    ours = {name for name in after if name.startswith("msdg_") and "_created" not in name}
    ours -= {name for name in ours if name.startswith(FIRST_TOKEN)}  # has a test of its own
    return {name: change for name in ours if (change := after[name] - before.get(name, 0))}


def test_requests_are_counted(server: Server) -> None:
    before = server.metrics()
    pictures = [image_part(picture_of("square", seed)) for seed in (200, 201)]
    for body in (
        chat_body(user(QUESTION, *pictures), retention=0.111),
        chat_body(user(QUESTION, pictures[0]), retention=1.0),
        chat_body(user(QUESTION), retention=0.111),
        chat_body(user(QUESTION, pictures[0]), retention=2),
    ):
        server.post("/v1/chat/completions", body)
    changes = added(before, server.metrics())
    seconds = changes.pop(f"msdg_selection_seconds_sum{{{LABEL}}}")
    runs = changes.pop(f"msdg_selection_seconds_count{{{LABEL}}}")
    changes = {name: change for name, change in changes.items() if "seconds_bucket" not in name}
    assert 0 < seconds < 60
    assert changes.pop(f"msdg_image_store_bytes{{{LABEL}}}") > 0
    assert changes.pop(f"msdg_encoder_runs_total{{{LABEL}}}") == runs
    retention = "msdg_request_retention_ratio"
    assert changes.pop(f"{retention}_sum{{{LABEL}}}") == pytest.approx(1 + 128 / 1152)
    assert changes == {
        f"msdg_visual_tokens_total{{{LABEL}}}": 3 * 576,
        f"msdg_visual_tokens_kept_total{{{LABEL}}}": 128 + 576,
        f'msdg_images_total{{{LABEL},pruned="true"}}': 2,
        f'msdg_images_total{{{LABEL},pruned="false"}}': 1,
        f"msdg_encoder_images_total{{{LABEL}}}": 2,
        f"msdg_image_store_misses_total{{{LABEL}}}": 2,
        **{
            f'{retention}_bucket{{le="{bound}",{LABEL}}}': 1
            for bound in (0.15, 0.25, 0.35, 0.5, 0.75, 0.99)
        },
        f'{retention}_bucket{{le="1.0",{LABEL}}}': 2,
        f'{retention}_bucket{{le="+Inf",{LABEL}}}': 2,
        f"{retention}_count{{{LABEL}}}": 2,
    }


def test_a_repeated_request_runs_no_encoder(server: Server) -> None:
    body = chat_body(user(QUESTION, image_part(picture_of("square", 202))), retention=0.111)
    server.post("/v1/chat/completions", body)
    before = server.metrics()
    server.post("/v1/chat/completions", body)
    changes = added(before, server.metrics())
    assert f"msdg_encoder_images_total{{{LABEL}}}" not in changes
    assert changes[f'msdg_images_total{{{LABEL},pruned="true"}}'] == 1


def test_another_question_about_a_picture_hits_the_store(server: Server) -> None:
    picture = image_part(picture_of("square", 205))
    server.post("/v1/chat/completions", chat_body(user(QUESTION, picture), retention=0.111))
    before = server.metrics()
    other = chat_body(user("Is there a red circle?", picture), retention=0.222)
    server.post("/v1/chat/completions", other)
    changes = added(before, server.metrics())
    assert f"msdg_encoder_images_total{{{LABEL}}}" not in changes
    assert changes[f"msdg_image_store_hits_total{{{LABEL}}}"] == 1
    assert f"msdg_image_store_misses_total{{{LABEL}}}" not in changes


def test_first_tokens_are_timed_by_retention_on_every_route(server: Server) -> None:
    def times() -> dict[str, float]:
        return {name: value for name, value in server.metrics().items() if "first_token" in name}

    before = times()
    message = user(QUESTION, image_part(picture_of("square", 203)))
    whole = chat_body(message, retention=0.111)
    server.post("/v1/chat/completions", whole)
    server.post("/v1/chat/completions", {**whole, "stream": True})
    server.post("/v1/chat/completions", chat_body(message, retention=1.0))
    server.post("/v1/chat/completions/batch", {**whole, "messages": [[message], [message]]})
    url = message["content"][0]["image_url"]["url"]
    turn = {"role": "user", "content": [{"type": "input_image", "image_url": url}]}
    body = {"model": MODEL, "input": [turn], "retention": 0.333, "max_output_tokens": 4}
    server.post("/v1/responses", body)
    changes = {name: value - before.get(name, 0) for name, value in times().items()}
    ours = {
        bound: changes[f'{FIRST_TOKEN}_count{{{LABEL},retention_le="{bound}"}}']
        for bound in ("0.15", "0.35", "1.0")
    }
    assert ours == {"0.15": 4, "0.35": 1, "1.0": 1}
    seconds = sum(value for name, value in changes.items() if name.startswith(f"{FIRST_TOKEN}_sum"))
    stock = 'vllm:time_to_first_token_seconds_sum{engine="0",' + LABEL + "}"
    assert seconds == pytest.approx(changes[stock])


def test_the_page_is_valid_and_keeps_what_vllm_shows(server: Server) -> None:
    families = list(text_string_to_metric_families(server.get("/metrics").text))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    assert {"vllm:num_requests_running", "http_requests"} <= set(names)


def test_every_metric_and_label_that_the_deployment_reads_is_shown(server: Server) -> None:
    body = chat_body(user(QUESTION, image_part(picture_of("square", 204))), retention=0.111)
    server.post("/v1/chat/completions", body)
    _, with_target = documented_metrics()
    missing = not_shown(server.get("/metrics").text)
    assert {
        (name, label) for name, label in missing if not name.startswith(tuple(with_target))
    } == set()


def test_every_metric_is_defined_once_in_the_docs(server: Server) -> None:
    always, _ = documented_metrics()
    assert shown_metrics(server) == sorted(always)
