"""The query is what the user asked of the image, and nothing around it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from msdg_vllm.engine.api.queries import TurnMarkers, Turns, turns_of_messages
from tests.checkpoints import CHAT_TEMPLATE, make_tokenizer

ROOT = Path(__file__).parents[4]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def image(**extra: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": "data:,"}, **extra}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def test_image_turn_is_the_text_of_the_message_that_carries_the_image() -> None:
    turns = turns_of_messages(
        [
            {"role": "system", "content": "Be brief."},
            user(image(), text("What is this?")),
            {"role": "assistant", "content": "A cat."},
            {"role": "user", "content": "And what colour?"},
        ]
    )
    assert turns.query("image-turn", "image", 0) == "What is this?"
    assert turns.query("last-turn", "image", 0) == "And what colour?"
    assert turns.query("none", "image", 0) == ""


def test_image_without_words_takes_the_last_user_text() -> None:
    turns = turns_of_messages([user(image()), {"role": "user", "content": "What is it?"}])
    assert turns.query("image-turn", "image", 0) == "What is it?"


def test_each_image_has_its_own_turn_and_retention() -> None:
    turns = turns_of_messages(
        [
            user(image(retention=0.5), text("first"), image(), text("still first")),
            user({"image_url": {"url": "data:,"}}, text("second")),
        ]
    )
    queries = [turns.query("image-turn", "image", index) for index in range(3)]
    assert queries == ["first\nstill first", "first\nstill first", "second"]
    assert [turns.item("image", index).retention for index in range(3)] == [0.5, None, None]


def test_images_and_videos_are_counted_apart() -> None:
    turns = turns_of_messages(
        [user({"type": "video_url"}, text("clip")), user({"type": "input_image"}, text("still"))]
    )
    assert turns.query("image-turn", "video", 0) == "clip"
    assert turns.query("image-turn", "image", 0) == "still"


@pytest.mark.parametrize("content", [None, "", [], [text("")]])
def test_conversation_without_words_has_no_query(content: Any) -> None:
    turns = turns_of_messages([{"role": "user", "content": content}])
    assert turns == Turns()


def test_image_of_a_tool_takes_the_last_user_text() -> None:
    turns = turns_of_messages(
        [
            {"role": "user", "content": "Draw a fox."},
            {"role": "tool", "content": [image(), text("rendered in 3 s")]},
        ]
    )
    assert turns.query("image-turn", "image", 0) == "Draw a fox."


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(["<image>", "<|im_start|>", "<|im_end|>"])


def turns_of(prompt: str, tokenizer: Any, template: str | None) -> Turns:
    markers = TurnMarkers.of_template(tokenizer, template)
    image_id = tokenizer.convert_tokens_to_ids("<image>")
    return markers.turns_of_prompt(tokenizer.encode(prompt), tokenizer, {image_id: "image"})


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (
            CHAT_TEMPLATE,
            "A chat. USER: <image>\nWhat is this? ASSISTANT: a fox USER: And that? ASSISTANT:",
        ),
        (
            CHATML,
            "<|im_start|>system\nA chat.<|im_end|>\n<|im_start|>user\n<image>What is this?"
            "<|im_end|>\n<|im_start|>assistant\na fox<|im_end|>\n<|im_start|>user\nAnd that?"
            "<|im_end|>\n<|im_start|>assistant\n",
        ),
    ],
    ids=["plain", "chatml"],
)
def test_turns_are_found_in_a_templated_prompt(tokenizer: Any, template: str, prompt: str) -> None:
    turns = turns_of(prompt, tokenizer, template)
    assert turns.query("image-turn", "image", 0) == "What is this?"
    assert turns.query("last-turn", "image", 0) == "And that?"


def test_prompt_of_another_format_is_all_query(tokenizer: Any) -> None:
    turns = turns_of("<s><image> What is this?", tokenizer, CHAT_TEMPLATE)
    assert turns.query("image-turn", "image", 0) == "What is this?"
    turns = turns_of("Question: <image> What is this?", tokenizer, None)
    assert turns.query("image-turn", "image", 0) == "Question:  What is this?"


MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}[INST] "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>\n"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %} [/INST]"
    "{% else %}{{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
# What ends an answer comes with the next turn, as does what begins a prompt.
LLAMA = MISTRAL.replace("{{ eos_token }}{% endif %}", "{% endif %}").replace(
    "[INST] ", "{% if not loop.first %}{{ eos_token }}{{ bos_token }}{% endif %}[INST] "
)
DEFAULT_SYSTEM = "<|im_start|>system\nYou are helpful.<|im_end|>\n" + CHATML
IMAGES_FIRST = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% if message['content'] is string %}{{ message['content'] + ' ' }}{% else %}"
    "{% for part in message['content'] if part['type'] == 'image' %}<image>\n{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] + ' ' }}"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "chatml with a system prompt": DEFAULT_SYSTEM,
    "mistral": MISTRAL,
    "llama": LLAMA,
    "images first": IMAGES_FIRST,
    "tests": CHAT_TEMPLATE,
    **{
        name: (ROOT / "models" / name / "chat_template.jinja")
        .read_text()
        .replace("<|vision_start|><|image_pad|><|vision_end|>", "<image>")
        for name in ("scenes-llava", "scenes-qwen")
    },
}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one turn": [user(image(), text("What is this?"))],
    "split text": [user(image(), text("What "), text("is this?"))],
    "image between": [user(text("Is this "), image(), text(" a fox?"))],
    "image last": [user(text("What is this?"), image())],
    "two turns": [
        user(image(), text("What is this?")),
        {"role": "assistant", "content": "a fox"},
        user(text("And that? "), image(), text("And this?")),
    ],
    "a later question": [
        user(image(), text("What is this?")),
        {"role": "assistant", "content": "a fox"},
        {"role": "user", "content": "Are you sure?"},
    ],
}


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_prompt_has_the_queries_of_the_chat_that_it_was_made_from(
    tokenizer: Any, template: str, chat: list[dict[str, Any]]
) -> None:
    def as_vllm_has_it(message: dict[str, Any]) -> dict[str, Any]:
        parts = message["content"]
        if message["role"] == "user":
            parts = [text(parts)] if isinstance(parts, str) else parts
            parts = [part if part["type"] == "text" else {"type": "image"} for part in parts]
        return {**message, "content": parts}

    prompt = tokenizer.apply_chat_template(
        [as_vllm_has_it(message) for message in chat],
        chat_template=template,
        tokenize=False,
        add_generation_prompt=True,
    )
    image_id = tokenizer.convert_tokens_to_ids("<image>")
    markers = TurnMarkers.of_template(tokenizer, template, {image_id})
    token_ids = tokenizer.encode(prompt, add_special_tokens=False)
    from_prompt = markers.turns_of_prompt(token_ids, tokenizer, {image_id: "image"})
    from_chat = turns_of_messages(chat, markers.joints)
    assert from_prompt == from_chat
    assert not any(word in from_prompt.last for word in ("user", "USER", "INST", "system", "<"))


def test_markers_begin_with_the_users_own_turn(tokenizer: Any) -> None:
    assert TurnMarkers.of_template(tokenizer, DEFAULT_SYSTEM).user_start == "<|im_start|>user"
    for template in (MISTRAL, LLAMA):
        assert TurnMarkers.of_template(tokenizer, template).user_start == "[INST]"


def test_what_others_say_after_the_last_question_is_no_part_of_it(tokenizer: Any) -> None:
    prompt = (
        "<|im_start|>user\n<image>What is this?<|im_end|>\n<|im_start|>tool\nrendered<|im_end|>\n"
        "<|im_start|>assistant\na fox<|im_end|>\n"
    )
    turns = turns_of(prompt, tokenizer, CHATML)
    assert turns.last == turns.query("image-turn", "image", 0) == "What is this?"
