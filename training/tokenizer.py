"""Tokenizer: whole words where the model knows them, characters and bytes for all other text."""

import re

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.quality.scenes import COLORS, SHAPES

IMAGE_TOKEN = "<image>"
QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", IMAGE_TOKEN)
_ROLES = ("USER:", "ASSISTANT:", "SYSTEM:")
_WORD = " ?[A-Za-z]?[a-z]+"

PLURALS = {shape: f"{shape}es" if shape == "cross" else f"{shape}s" for shape in SHAPES}
# Every word of the questions, and some that people are likely to use in their own.
_WORDS = (
    "Is is are there a an the in picture image photo Can you see What what Which which color "
    "colour colors colours of shape shapes object objects thing things How many sign signs left "
    "right above below or and to it does say written on Read read text code word letter number "
    "these this that Answer answer with yes no Yes No not any one two three four five zero none "
    "Describe describe Where where Count count Look look at next near under over between side "
    "top bottom middle big small please Please Do do have has I can find show Tell tell me from "
    "by for as be background option options single only using true false"
)

_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'assistant' -%}{{ 'ASSISTANT:\n' }}"
    "{%- elif message.role == 'system' -%}{{ 'SYSTEM:' }}"
    "{%- else -%}{{ 'USER:' }}{%- endif -%}"
    "{%- if message.content is string -%}{{ message.content }}"
    "{%- else -%}"
    "{%- for part in message.content if part.type == 'image' -%}{{ 'IMAGE\n' }}{%- endfor -%}"
    "{%- for part in message.content if part.type == 'text' -%}{{ part.text }}{%- endfor -%}"
    "{%- endif -%}"
    "{%- if message.role == 'assistant' -%}{{ '</s>' }}{%- else -%}{{ '\n' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'ASSISTANT:\n' }}{%- endif -%}"
)
CHAT_TEMPLATE = _CHAT_TEMPLATE.replace("IMAGE", IMAGE_TOKEN)
QWEN_CHAT_TEMPLATE = _CHAT_TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")


def build_qwen_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer with Qwen's marks in places reserved for such; all else is equal."""
    marks = ("vision_bos_token", "vision_eos_token", "image_token", "video_token")
    return _build(dict(zip(marks, QWEN_TOKENS, strict=True)), QWEN_CHAT_TEMPLATE)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer; its vocabulary is a multiple of 64, and no text is ever unknown."""
    return _build({"image_token": IMAGE_TOKEN}, CHAT_TEMPLATE)


def _build(marks: dict[str, str], chat_template: str) -> PreTrainedTokenizerFast:
    words = dict.fromkeys([*_WORDS.split(), *COLORS, *SHAPES, *PLURALS.values()])
    tokens = [*_SPECIAL, *_ROLES]
    tokens += [chr(point) for point in range(32, 127)] + ["\n"]
    tokens += [word for word in words if re.fullmatch(_WORD, word) and len(word) > 1]
    tokens += [f" {word}" for word in words if re.fullmatch(_WORD, word)]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = list(dict.fromkeys(tokens))
    reserved = [f"<reserved_{number}>" for number in range(-len(tokens) % 64)]
    added = [mark for mark in marks.values() if mark not in tokens]
    tokens += [*added, *reserved[len(added) :]]
    # With no merges, a piece is either one known word or falls apart into its characters.
    model = models.BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[],
        byte_fallback=True,
        ignore_merges=True,
        unk_token="<unk>",
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_WORD), behavior="isolated")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        extra_special_tokens=marks,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=2048,
    )
    wrapped.add_tokens(list(_ROLES))
    wrapped.chat_template = chat_template
    return wrapped
