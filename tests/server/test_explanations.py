"""Explanations: what was kept and why, equal to an independent computation."""

from __future__ import annotations

import re
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from msdg_vllm.core import analyze_image, score_tokens
from msdg_vllm.engine.api.pixels import content_number
from msdg_vllm.methods import Encoder, Signals, method_named
from msdg_vllm.methods import Image as MethodImage
from tests.engine.llava_oracle import LlavaOracle
from tests.pictures import picture_of
from tests.server.running import MODEL, Server, chat_body, image_part, user

CHAT = "/v1/chat/completions"
QUESTIONS = ("Is there a blue circle in the picture?", "Read the code on the sign.")
EXPLAIN = {"pruning": {"explain": True}}


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> LlavaOracle:
    return LlavaOracle(checkpoint)


def explained(server: Server, *messages: dict[str, Any], **fields: Any) -> Any:
    answer = server.post(CHAT, chat_body(*messages, **{**EXPLAIN, **fields}))
    assert answer.status_code == 200, answer.text
    return answer.json()["pruning"]["id"]


def images_of(server: Server, explanation_id: str) -> list[dict[str, Any]]:
    answer = server.get(f"/v1/pruning/{explanation_id}")
    assert answer.status_code == 200, answer.text
    images: list[dict[str, Any]] = answer.json()["images"]
    return images


@pytest.mark.parametrize("kind", ["square", "wide", "tall"])
@pytest.mark.parametrize("question", QUESTIONS)
def test_an_explanation_equals_the_reference(
    server: Server, oracle: LlavaOracle, kind: str, question: str
) -> None:
    picture = picture_of(kind, 1)
    key = explained(server, user(question, image_part(picture)), retention=0.111)
    (image,) = images_of(server, key)
    assert image["kept"] == oracle.keep(picture, question, 64)[1]


def test_a_question_in_parts_keeps_what_the_whole_question_keeps(
    server: Server, oracle: LlavaOracle
) -> None:
    picture, question = picture_of("wide", 2), QUESTIONS[0]
    message = user(question[:11], image_part(picture))
    message["content"] += user(question[11:])["content"]
    (image,) = images_of(server, explained(server, message, retention=0.111))
    assert image["kept"] == oracle.keep(picture, question, 64)[1]


def test_random_tokens_are_drawn_by_the_pixels_that_came(server: Server) -> None:
    picture, wishes = picture_of("square", 2), {"explain": True, "method": "random"}
    message = user(QUESTIONS[0], image_part(picture))
    (image,) = images_of(server, explained(server, message, retention=0.111, pruning=wishes))
    seeded = MethodImage(
        Signals(), torch.zeros(576, 1), Encoder(1, None), seed=content_number(picture)
    )
    assert image["kept"] == method_named("random").select(seeded, 64).indices.tolist()


@torch.no_grad()
def test_sinks_groups_and_scores_are_those_of_the_method(
    server: Server, oracle: LlavaOracle
) -> None:
    picture = picture_of("square", 1)
    key = explained(server, user(QUESTIONS[0], image_part(picture)), retention=0.333)
    (image,) = images_of(server, key)

    pixels = oracle.processor.image_processor(picture, return_tensors="pt")["pixel_values"]
    states = oracle.model.model.vision_tower(pixels, output_hidden_states=True).hidden_states
    signals = analyze_image(
        {layer: states[layer][0, 1:] for layer in oracle.profile.layers}, oracle.profile
    )
    visual = oracle.model.model.multi_modal_projector(states[-2][0, 1:])
    query_ids = oracle.processor.tokenizer.encode(QUESTIONS[0], add_special_tokens=False)
    query = oracle.model.get_input_embeddings()(torch.tensor(query_ids))
    assert image["sinks"] == signals.sink_mask.nonzero().flatten().tolist()
    assert image["groups"] == signals.groups[image["kept"]].tolist()
    scores = score_tokens(signals, visual, query).score
    assert torch.allclose(torch.tensor(image["scores"]), scores, rtol=1e-3, atol=1e-4)


def test_a_given_query_replaces_the_question(server: Server, oracle: LlavaOracle) -> None:
    picture = picture_of("square", 2)
    key = explained(
        server,
        user(QUESTIONS[0], image_part(picture)),
        retention=0.222,
        pruning={"explain": True, "query": QUESTIONS[1]},
    )
    (image,) = images_of(server, key)
    assert image["kept"] == oracle.keep(picture, QUESTIONS[1], 128)[1]


def test_an_explanation_is_consistent(server: Server) -> None:
    key = explained(
        server, user(QUESTIONS[0], image_part(picture_of("square", 3))), retention=0.333
    )
    (image,) = images_of(server, key)
    assert (image["index"], image["tile"]) == (0, 0)
    assert image["grid"] == [24, 24]
    assert image["num_tokens"] == len(image["scores"]) == 576
    assert len(image["kept"]) == len(image["groups"]) == 192
    assert image["kept"] == sorted(set(image["kept"]))
    assert not set(image["kept"]) & set(image["sinks"])
    assert min(image["groups"]) >= 0


def test_images_are_listed_in_the_order_of_the_request(server: Server, oracle: LlavaOracle) -> None:
    pictures = [picture_of("square", seed) for seed in (4, 5, 4)]
    parts = [
        image_part(pictures[0], retention=0.111),
        image_part(pictures[1], retention=0.056),
        image_part(pictures[2], retention=0.222),
        image_part(pictures[1], retention=1.0),
    ]
    key = explained(server, user(QUESTIONS[0], *parts))
    images = images_of(server, key)
    assert [image["index"] for image in images] == [0, 1, 2]
    for image, picture, budget in zip(images, pictures, (64, 32, 128), strict=True):
        assert image["kept"] == oracle.keep(picture, QUESTIONS[0], budget)[1]


def test_the_same_image_twice_is_explained_twice(server: Server) -> None:
    part = image_part(picture_of("square", 6))
    key = explained(server, user(QUESTIONS[0], part, part), retention=0.111)
    first, second = images_of(server, key)
    assert (first["index"], second["index"]) == (0, 1)
    assert first["kept"] == second["kept"]


def test_asking_again_explains_again(server: Server) -> None:
    message = user(QUESTIONS[0], image_part(picture_of("square", 7)))
    keys = [explained(server, message, retention=0.111) for _ in range(2)]
    assert keys[0] != keys[1]
    (first,), (second,) = (images_of(server, key) for key in keys)
    assert [first.pop("encoded"), second.pop("encoded")] == [True, False]
    assert first == second


def test_a_stream_names_its_explanation_in_the_first_chunk(server: Server) -> None:
    chunks = list(
        server.client.chat.completions.create(
            model=MODEL,
            messages=[user(QUESTIONS[0], image_part(picture_of("square", 8)))],
            max_tokens=4,
            stream=True,
            extra_body={"retention": 0.111, **EXPLAIN},
        )
    )
    first, *others = [(chunk.model_extra or {}).get("pruning") for chunk in chunks]
    assert first is not None
    assert not any(others)
    assert len(images_of(server, first["id"])[0]["kept"]) == 64


def test_nothing_pruned_means_nothing_to_explain(server: Server) -> None:
    picture = image_part(picture_of("square"))
    assert explained(server, user(QUESTIONS[0], picture), retention=1.0) is None
    assert explained(server, user(QUESTIONS[0]), retention=0.5) is None


def test_requests_that_did_not_ask_have_no_explanation(server: Server) -> None:
    body = chat_body(user(QUESTIONS[0], image_part(picture_of("square"))), retention=0.5)
    assert "pruning" not in server.post(CHAT, body).json()


@pytest.mark.parametrize(
    "unknown", ["0" * 16, "f" * 16, "7fffffffffffffff", "1", "nothing", "-000000000000001", "%00"]
)
def test_unknown_explanations_are_not_found(server: Server, unknown: str) -> None:
    for path in (f"/v1/pruning/{unknown}", f"/v1/pruning/{unknown}/overlay.png"):
        answer = server.get(path)
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == 404


def test_ids_cannot_be_guessed(server: Server) -> None:
    message = user(QUESTIONS[0], image_part(picture_of("tiny")))
    keys = [explained(server, message, retention=0.056) for _ in range(4)]
    assert all(re.fullmatch("[0-9a-f]{16}", key) for key in keys)
    values = sorted(int(key, 16) for key in keys)
    # Neighbours of random 63-bit numbers are farther apart than this but once in 2**40.
    assert all(b - a > 2**20 for a, b in pairwise(values))


def test_the_overlay_greys_out_what_was_discarded(server: Server) -> None:
    picture = picture_of("square", 9)
    key = explained(server, user(QUESTIONS[0], image_part(picture)), retention=0.222)
    (image,) = images_of(server, key)
    answer = server.get(f"/v1/pruning/{key}/overlay.png")
    assert answer.headers["content-type"] == "image/png"
    overlay = np.asarray(Image.open(BytesIO(answer.content)).convert("RGB"), dtype=float)
    original = np.asarray(picture, dtype=float)
    assert overlay.shape == original.shape

    def cells(pixels: np.ndarray) -> np.ndarray:
        rows = pixels.reshape(24, 14, 24, 14, 3).transpose(0, 2, 1, 3, 4)
        return rows.reshape(576, 14 * 14, 3)

    kept = np.isin(np.arange(576), image["kept"])
    error = np.abs(cells(overlay) - cells(original)).mean(axis=(1, 2))
    colour = np.ptp(cells(overlay), axis=2).max(axis=1)
    assert error[kept].max() < 2
    assert colour[~kept].max() <= 1


def test_the_overlay_has_a_row_per_image(server: Server) -> None:
    parts = [image_part(picture_of("square", seed)) for seed in (1, 2)]
    key = explained(server, user(QUESTIONS[0], *parts), retention=0.111)
    overlay = Image.open(BytesIO(server.get(f"/v1/pruning/{key}/overlay.png").content))
    assert overlay.size == (336, 336 * 2 + 8)
