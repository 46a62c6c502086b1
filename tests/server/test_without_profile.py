"""A server of a newer family, Qwen3-VL, whose encoder nobody has measured yet."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.pictures import make_picture, picture_of
from tests.qwen_checkpoint import make_qwen3_vl
from tests.server.running import (
    MODEL,
    Server,
    chat_body,
    data_url,
    image_part,
    running_server,
    user,
)

QUESTION = "Read the code on the sign."
CHAT = "/v1/chat/completions"
# Columns and rows of tokens of the wide picture, of 32 x 32 pixels each; frames of the video.
GRID = (6, 28)
FRAMES = 3


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = make_qwen3_vl(tmp_path_factory.mktemp("qwen3_vl"))
    (folder / "msdg_profile.json").unlink()
    log = tmp_path_factory.mktemp("server") / "server.log"
    limits = '--limit-mm-per-prompt={"image": 12, "video": 1}'
    options = "--max-model-len=512", "--dtype=bfloat16", limits
    with running_server(folder, log, *options) as running:
        yield running


def video_part() -> dict[str, Any]:
    """Six frames, which the model reads as three."""
    picture = np.asarray(make_picture(192, 128, 3))
    frames = [Image.fromarray(np.roll(picture, 9 * n, axis=1)) for n in range(2 * FRAMES)]
    encoded = ",".join(data_url(frame, "jpeg").split(",")[1] for frame in frames)
    return {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{encoded}"}}


def refused(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    answer = server.post(CHAT, body)
    assert answer.status_code == 400
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_the_default_is_a_method_that_needs_no_profile(qwen: Server) -> None:
    described = qwen.get("/v1/pruning").json()
    assert described["architecture"] == "Qwen3VLForConditionalGeneration"
    assert described["encoder"] == {"name": None, "profile": None}
    assert described["default_method"] == "divprune"
    assert {"divprune", "cdpruner", "hiprune"} <= set(described["methods"])
    assert "msdg-vllm calibrate" in described["unavailable_methods"]["msdg"]
    assert "class token" in described["unavailable_methods"]["cls_attention"]
    assert "carry 3 more" in described["unavailable_methods"]["visionzip"]
    assert qwen.log.read_text(errors="replace").count("There is no profile of this") == 1


@pytest.mark.parametrize(
    ("method", "words"),
    [("msdg", "msdg-vllm calibrate"), ("cls_attention", "has none"), ("visionzip", "merges")],
)
@pytest.mark.parametrize("retention", [0.222, 1.0])
def test_a_method_that_the_model_cannot_feed_is_a_400(
    qwen: Server, method: str, words: str, retention: float
) -> None:
    message = user(QUESTION, image_part(picture_of("wide")))
    body = chat_body(message, retention=retention, pruning={"method": method})
    error = refused(qwen, body)
    assert error["param"] == "pruning.method"
    assert words in error["message"]
    assert "'random'" in error["message"]
    body = chat_body(message, retention=0.222, pruning={"method": "hiprune"})
    assert qwen.post(CHAT, body).status_code == 200


def test_images_and_videos_are_counted(qwen: Server) -> None:
    before = qwen.metrics()
    parts = image_part(picture_of("wide", 7)), video_part()
    answer = qwen.post(CHAT, chat_body(user(QUESTION, *parts), retention=0.25))
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    image, video = GRID[0] * GRID[1], FRAMES * 6 * 4
    details = usage["prompt_tokens_details"]
    assert details["visual_tokens_total"] == image + video
    assert details["visual_tokens"] == image // 4 + video // 4
    assert usage["prompt_tokens"] > details["visual_tokens"]
    after = qwen.metrics()
    label = f'{{model_name="{MODEL}"}}'
    for name, count in (
        ("msdg_visual_tokens_total", image + video),
        ("msdg_visual_tokens_kept_total", image // 4 + video // 4),
    ):
        assert after[name + label] - before.get(name + label, 0) == count


def test_an_image_and_a_video_are_explained(qwen: Server) -> None:
    picture = picture_of("wide", 8)
    body = chat_body(
        user(QUESTION, image_part(picture), video_part()),
        retention=0.25,
        pruning={"explain": True},
    )
    key = qwen.post(CHAT, body).json()["pruning"]["id"]
    image, video = qwen.get(f"/v1/pruning/{key}").json()["images"]
    assert image["grid"] == [*GRID]
    assert video["grid"] == [FRAMES * 4, 6]
    assert len(image["kept"]) == GRID[0] * GRID[1] // 4
    assert len(video["kept"]) == FRAMES * 6 * 4 // 4
    overlay = Image.open(BytesIO(qwen.get(f"/v1/pruning/{key}/overlay.png").content))
    cells = np.asarray(overlay.convert("RGB"), dtype=float)[: GRID[0] * 14, : GRID[1] * 14]
    cells = cells.reshape(GRID[0], 14, GRID[1], 14, 3).swapaxes(1, 2).reshape(-1, 14 * 14, 3)
    seen = np.asarray(picture.resize((GRID[1] * 14, GRID[0] * 14)), dtype=float)
    seen = seen.reshape(GRID[0], 14, GRID[1], 14, 3).swapaxes(1, 2).reshape(-1, 14 * 14, 3)
    errors = np.abs(cells - seen).mean(axis=(1, 2))
    discarded = sorted(set(range(len(errors))) - set(image["kept"]))
    assert errors[image["kept"]].max() < errors[discarded].min()


def test_images_that_reach_beyond_the_rope_table_are_a_400_and_nobody_else_suffers(
    qwen: Server,
) -> None:
    thin = [image_part(make_picture(4800, 32, seed)) for seed in range(12)]
    error = refused(qwen, chat_body(user(QUESTION, *thin), retention=0.01))
    assert error["param"] == "messages"
    assert "up to 2048. Send fewer or smaller images" in error["message"]
    assert qwen.post(CHAT, chat_body(user(QUESTION, thin[0]), retention=0.01)).status_code == 200
