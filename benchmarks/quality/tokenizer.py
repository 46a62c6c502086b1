"""Tokenizer: whole words where the model knows them, characters and bytes for all other text."""

import re

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.quality.scenes import COLORS, SHAPES

IMAGE_TOKEN = "<image>"
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

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'assistant' -%}{{ 'ASSISTANT:\n' }}"
    "{%- elif message.role == 'system' -%}{{ 'SYSTEM:' }}"
    "{%- else -%}{{ 'USER:' }}{%- endif -%}"
    "{%- if message.content is string -%}{{ message.content }}"
    "{%- else -%}"
    "{%- for part in message.content if part.type == 'image' -%}{{ '<image>\n' }}{%- endfor -%}"
    "{%- for part in message.content if part.type == 'text' -%}{{ part.text }}{%- endfor -%}"
    "{%- endif -%}"
    "{%- if message.role == 'assistant' -%}{{ '</s>' }}{%- else -%}{{ '\n' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'ASSISTANT:\n' }}{%- endif -%}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer; its vocabulary is a multiple of 64, and no text is ever unknown."""
    words = dict.fromkeys([*_WORDS.split(), *COLORS, *SHAPES, *PLURALS.values()])
    tokens = [*_SPECIAL, *_ROLES]
    tokens += [chr(point) for point in range(32, 127)] + ["\n"]
    tokens += [word for word in words if re.fullmatch(_WORD, word) and len(word) > 1]
    tokens += [f" {word}" for word in words if re.fullmatch(_WORD, word)]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = list(dict.fromkeys(tokens))
    tokens += [f"<reserved_{number}>" for number in range(-len(tokens) % 64)]
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
        extra_special_tokens={"image_token": IMAGE_TOKEN},
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=2048,
    )
    wrapped.add_tokens(list(_ROLES))
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped
