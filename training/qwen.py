"""Qwen: a Qwen2.5-VL of small widths, built from stock transformers classes."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import (
    AttentionInterface,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision

from training.canvas import AnyForm
from training.tokenizer import QWEN_TOKENS

PATCH_SIDE = 4
# A square picture of any size becomes 96 x 96 pixels, 12 x 12 tokens; others about as many.
CANVAS = AnyForm(PATCH_SIDE, min_pixels=96 * 96, max_pixels=10_800)
# Pictures of 3 x 3 to 24 x 24 tokens, as they are.
FINE_CANVAS = AnyForm(PATCH_SIDE, min_pixels=24 * 24, max_pixels=192 * 192)
PATCHES = 4  # of a token
WIDTH = 64  # of the tower
EARLY_LAYERS = 6
SPELLING_LAYER = 2
_WINDOW = 4  # tokens, per side
_DEPTH = 12
_FULL_ATTENTION = (2, 5, 8, 11)
_HEADS = 2
_HEAD_WIDTH = WIDTH // _HEADS
_MROPE_SECTION = (4, 6, 6)


def build_qwen(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLForConditionalGeneration:
    """Return an untrained model; heads are 32 wide, which vLLM's CPU attention supports."""
    ids = tokenizer.get_vocab()
    start, end, image, video = (ids[name] for name in QWEN_TOKENS)
    vision = {
        "depth": _DEPTH,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_heads": _HEADS,
        "patch_size": PATCH_SIDE,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
        "window_size": _WINDOW * 2 * PATCH_SIDE,
        "fullatt_block_indexes": list(_FULL_ATTENTION),
        "out_hidden_size": 128,
    }
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        # The usual base turns the waves of columns so slowly that two columns look the same.
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000.0,
            "mrope_section": list(_MROPE_SECTION),
        },
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = Qwen2_5_VLConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    _start_with_neighbours(model)
    return model


# For each early layer and head, which patch a patch looks at first: (down, right) from itself.
_FIRST_LOOKS = (
    ((0, 1), (1, 0)),
    ((0, -1), (-1, 0)),
    ((0, 2), (0, -2)),
    ((2, 0), (-2, 0)),
    ((0, 2), (0, -2)),
    ((0, 0), (0, 0)),
)


@torch.no_grad()
def _start_with_neighbours(model: Qwen2_5_VLForConditionalGeneration) -> None:
    """Begin where each head of an early layer looks at one neighbour, and at what looks alike.

    Rotations make any offset a matter of the biases of queries and keys. Otherwise a tower this
    narrow spends its training on finding out which patches touch. Layers after the early ones
    begin by changing nothing, so that training can leave them out at first.
    """
    tower: Any = model.model.visual
    # Its own generator: what is drawn here changes nothing that is drawn elsewhere.
    generator = torch.Generator().manual_seed(0)

    def draw(weight: Tensor, scale: float) -> None:
        weight.normal_(0, scale / weight[0].numel() ** 0.5, generator=generator)

    draw(tower.patch_embed.proj.weight, 1.0)
    rates = tower.rotary_pos_emb.inv_freq[:2]
    half = _HEAD_WIDTH // 2
    for layer, looks in zip(tower.blocks, _FIRST_LOOKS + ((),) * _DEPTH, strict=False):
        query, key, value = layer.attn.qkv.weight.chunk(3)
        draw(query, 0.7)
        key.copy_(query)
        draw(value, 1.0)
        layer.attn.qkv.bias.zero_()
        for head, look in enumerate(looks):
            query_bias, key_bias, _ = layer.attn.qkv.bias.view(3, _HEADS, _HEAD_WIDTH)[:, head]
            strength = 4.5 if any(look) else 2.5
            for axis, steps in enumerate(look):
                places = slice(axis * half // 2, axis * half // 2 + len(rates))
                turned = slice(places.start + half, places.stop + half)
                query_bias[places] = strength * (rates * steps).cos()
                query_bias[turned] = strength * (rates * steps).sin()
                key_bias[places] = strength
        early = len(looks) > 0
        draw(layer.attn.proj.weight, 0.7 * early)
        for part in (layer.mlp.gate_proj, layer.mlp.up_proj):
            draw(part.weight, 1.0)
        draw(layer.mlp.down_proj.weight, 0.7 * early)
    draw(tower.merger.mlp[0].weight, 1.0)
    draw(tower.merger.mlp[2].weight, 0.1)  # tokens about as long as words


# For layers and heads of the language model that begin by looking back: how far, and by which
# waves. The others begin by looking at tokens of the same words.
_PREVIOUS = (1, slice(0, 4), 4.2)
_RECENT = (5, slice(3, 6), 2.5)
_LOOKS_BACK = {(0, 1): _PREVIOUS, (1, 2): _PREVIOUS, (1, 3): _RECENT, (2, 3): _RECENT}


@torch.no_grad()
def start_with_context(model: Qwen2_5_VLForConditionalGeneration) -> None:
    """Begin where some heads of the language model gather the words just before.

    A question names a colour and a shape; a token that holds both finds the item that has both.
    Comparing words uses slow waves mostly, so that it does not depend on where they are.
    """
    language: Any = model.model.language_model
    rates = language.rotary_emb.inv_freq
    slow = torch.tensor([0.4] * 4 + [0.7] * 4 + [1.5] * 8).repeat(2)
    for number, layer in enumerate(language.layers):
        attention = layer.self_attn
        width = attention.head_dim
        for head in range(attention.num_heads):
            rows = slice(head * width, (head + 1) * width)
            query, key = attention.q_proj, attention.k_proj
            query.weight[rows] *= slow.unsqueeze(1)
            if (number, head) in _LOOKS_BACK:
                distance, band, strength = _LOOKS_BACK[number, head]
                turned = slice(band.start + width // 2, band.stop + width // 2)
                query.weight[rows] *= 0.2
                query.bias[rows][band] = strength * (rates[band] * distance).cos()
                query.bias[rows][turned] = -strength * (rates[band] * distance).sin()
                key.bias[rows][band] = strength
            key.weight[rows] = query.weight[rows]


@torch.no_grad()
def start_with_places(
    model: Qwen2_5_VLForConditionalGeneration, places: Tensor, opening: Tensor
) -> None:
    """Begin where the first layer of the language model tells each token its row and column.

    M-RoPE says where a token is only in comparison with others. One head for rows and one for
    columns compare with the two tokens before the picture, by waves slow enough to be even, and
    write the outcome along `places`.

    Args:
        model: Its language model is changed.
        places: What one column to the right and one row down add to a token, `(D, 2)`.
        opening: The two tokens before the picture, `(2,)`.
    """
    language: Any = model.model.language_model
    attention = language.layers[0].self_attn
    rates = language.rotary_emb.inv_freq
    width = attention.head_dim
    half = width // 2
    first, second = functional.normalize(model.get_input_embeddings()(opening), dim=-1)
    # A normalised state is as long as the root of its width.
    length = first.numel() ** 0.5
    slope, middle = 0.36, 6.5
    still = _MROPE_SECTION[0] - 1  # all tokens of a picture have the same time
    bands = ((3, slice(10, 13)), (2, slice(6, 8)))  # columns, then rows
    for axis, (head, band) in enumerate(bands):
        rows = slice(head * width, (head + 1) * width)
        query, key, value = (getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj"))
        for part in (query, key, value):
            part.weight[rows] *= 0.0
        attention.o_proj.weight[:, rows] *= 0.0
        strength = (slope * width**0.5 / (2 * rates[band].sum())) ** 0.5
        query.bias[rows][band] = strength
        towards = torch.zeros(width)
        towards[band.start + half : band.stop + half] = strength
        # As strong as makes all other tokens count for nothing, and both equal in the middle.
        query.bias[rows][still] = 7.0
        even = slope * (middle + 1.5)
        for word, sign, logit, distance in ((first, 1, 10.0, 2), (second, -1, 10.0 + even, 1)):
            match = sign * towards
            match[still] = logit * width**0.5 / (7.0 * (rates[still] * distance).cos())
            key.weight[rows] += torch.outer(match, word) / length
        value.weight[rows][0] = (first - second) / length
        attention.o_proj.weight[:, head * width] = places[:, axis] / (slope / 2)


def _attention_in_full(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, Any]:
    with torch.autocast("cpu", enabled=False):
        return sdpa_attention_forward(
            module, query.float(), key.float(), value.float(), mask, **options
        )


def prepare_mixed_precision(model: Qwen2_5_VLForConditionalGeneration) -> None:
    """Keep attention in full precision under autocast: on a CPU its gradient is slower in half."""
    AttentionInterface.register("sdpa_in_full", _attention_in_full)
    AttentionMaskInterface.register("sdpa_in_full", sdpa_mask)
    model.model.language_model.set_attn_implementation("sdpa_in_full")


def encode_tokens(
    model: Qwen2_5_VLForConditionalGeneration,
    pixels: Tensor,
    numbers: Tensor,
    form: tuple[int, int],
    num_layers: int | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Return projected visual tokens `(B, n, D)` and the states after each layer `(B, n, 4 d)`.

    Those of the model's own forward if all tokens of the picture are given; with fewer the tower
    is shown those only, in their places.

    Args:
        model: Its tower is run.
        pixels: Normalised, `(B, n, 4 * 3 * patch ** 2)`.
        numbers: Which tokens these are in raster order, `(B, n)`.
        form: Rows and columns of the picture.
        num_layers: As in a slice.
    """
    tower: Any = model.model.visual
    # A still picture is two equal frames.
    embed = tower.patch_embed.proj.weight.sum(2).flatten(1)
    batch, number = numbers.shape
    state = functional.linear(pixels.reshape(batch, number * PATCHES, -1), embed)
    rows, columns = numbers // form[1], numbers % form[1]
    inner = torch.arange(PATCHES)
    places = torch.stack(
        [
            (2 * rows.unsqueeze(-1) + inner // 2).flatten(1),
            (2 * columns.unsqueeze(-1) + inner % 2).flatten(1),
        ]
    )  # (2, B, P)
    cos, sin = tower.rotary_pos_emb(state, places.flatten(1).T)
    cos, sin = (wave.view(batch, number * PATCHES, -1) for wave in (cos, sin))
    whole = number == form[0] * form[1]
    window = (rows // _WINDOW) * 64 + columns // _WINDOW
    window = window.repeat_interleave(PATCHES, dim=1)
    layout = _windows(window[0]) if whole else None
    mask = None if whole else (window[:, None, :, None] == window[:, None, None, :])
    states = []
    for index, block in enumerate(tower.blocks[:num_layers]):
        state = state + _attend(
            block.attn, block.norm1(state), cos, sin, index in _FULL_ATTENTION, layout, mask
        )
        state = state + block.mlp(block.norm2(state))
        states.append(state.view(batch, number, -1))
    return tower.merger(state).view(batch, number, -1), states


def _windows(window: Tensor) -> tuple[Tensor, Tensor]:
    """Return the patches of each window `(W, most)`, and which of those places are filled."""
    _, inverse, sizes = window.unique(return_inverse=True, return_counts=True)
    most = int(sizes.max())
    order = inverse.argsort(stable=True)
    starts = sizes.cumsum(0) - sizes
    places = torch.arange(most)
    filled = places < sizes.unsqueeze(1)
    return order[(starts.unsqueeze(1) + places).clamp(max=len(window) - 1)] * filled, filled


def _attend(
    attention: Any,
    state: Tensor,
    cos: Tensor,
    sin: Tensor,
    full: bool,
    layout: tuple[Tensor, Tensor] | None,
    mask: Tensor | None,
) -> Tensor:
    batch, number, width = state.shape
    mixed = attention.qkv(state).view(batch, number, 3, _HEADS, -1)
    query, key, value = mixed.unbind(2)
    query, key = apply_rotary_pos_emb_vision(query, key, cos, sin)
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))  # (B, heads, P, d)
    query, key, value = query.float(), key.float(), value.float()
    if full or layout is None:
        with torch.autocast("cpu", enabled=False):
            seen = functional.scaled_dot_product_attention(
                query, key, value, attn_mask=None if full else mask
            )
    else:
        patches, filled = layout
        num_windows, most = patches.shape
        query, key, value = (
            part[:, :, patches.flatten()]
            .view(batch, _HEADS, num_windows, most, -1)
            .transpose(1, 2)
            .flatten(0, 1)
            for part in (query, key, value)
        )
        keys = None
        if not filled.all():
            keys = filled[None, :, None, None].expand(batch, -1, -1, most, -1).flatten(0, 1)
        with torch.autocast("cpu", enabled=False):
            seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=keys)
        seen = seen.view(batch, num_windows, _HEADS, most, -1).transpose(1, 2)
        back = torch.empty(number, dtype=torch.long)
        back[patches[filled]] = torch.arange(num_windows * most).view_as(patches)[filled]
        seen = seen.flatten(2, 3)[:, :, back]
    result: Tensor = attention.proj(seen.transpose(1, 2).reshape(batch, number, width))
    return result
