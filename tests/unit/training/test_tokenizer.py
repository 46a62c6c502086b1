"""The tokenizer knows the words of the questions, and no text is unknown to it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.quality.questions import ask_one_of_each
from benchmarks.quality.scenes import sample_scene
from training.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer()


def test_the_vocabulary_can_be_split_over_devices():
    assert len(TOKENIZER) % 64 == 0


def test_every_word_of_the_questions_is_one_token():
    for number in range(100):
        for question in ask_one_of_each(sample_scene(number)):
            for token in TOKENIZER.tokenize(question.text):
                assert len(token) > 1 or not token.islower(), question.text


def test_a_code_is_read_character_by_character():
    assert TOKENIZER.tokenize("K7B") == ["K", "7", "B"]


@given(st.text(max_size=40).filter(lambda text: "<" not in text and ":" not in text))
def test_any_text_comes_back_as_it_was(text):
    ids = TOKENIZER(text).input_ids
    assert TOKENIZER.unk_token_id not in ids
    assert TOKENIZER.decode(ids) == text


@pytest.mark.parametrize("content", ["hello", [{"type": "text", "text": "hello"}]])
def test_the_chat_template_takes_text_and_parts(content):
    messages = [{"role": "user", "content": content}]
    rendered = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "USER:hello\nASSISTANT:\n"
