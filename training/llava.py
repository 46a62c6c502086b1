"""Architecture: a LLaVA-1.5 of small widths, built from stock transformers classes."""

import math
from typing import Any

import torch
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
)

from training.tokenizer import IMAGE_TOKEN

IMAGE_SIDE = 96
PATCH_SIDE = 8
GRID = IMAGE_SIDE // PATCH_SIDE
NUM_VISUAL_TOKENS = GRID * GRID
EARLY_LAYERS = 5
SPELLING_LAYER = 2
TOWER_WIDTH = 128


def build_llava(tokenizer: PreTrainedTokenizerFast) -> LlavaForConditionalGeneration:
    """Return an untrained model; heads are 32 wide, which vLLM's CPU attention supports."""
    vision = CLIPVisionConfig(
        hidden_size=TOWER_WIDTH,
        intermediate_size=256,
        num_hidden_layers=12,
        num_attention_heads=4,
        image_size=IMAGE_SIDE,
        patch_size=PATCH_SIDE,
        hidden_act="gelu",
        projection_dim=128,
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.get_vocab()[IMAGE_TOKEN],
        projector_hidden_act="gelu",
        vision_feature_select_strategy="default",
        vision_feature_layer=-2,
        image_seq_length=NUM_VISUAL_TOKENS,
        tie_word_embeddings=False,
    )
    model = LlavaForConditionalGeneration(config)
    start_as_a_lookup(model)
    _start_with_neighbours(model)
    return model


@torch.no_grad()
def start_as_a_lookup(model: Any) -> None:
    """Begin where tokens attend to tokens of the same words and say the words they find there.

    Queries equal keys, values are copied as they are, and the output layer reads the words of the
    input layer. From an unstructured start, looking up one word of an item by another takes most
    of the training to appear.
    """
    language: Any = model.model.language_model
    words = model.get_input_embeddings().get_parameter("weight")
    width = words.shape[1]
    # Rows of length one: sums of a few words stay apart from each other in direction.
    words.normal_(0, width**-0.5)
    for layer in language.layers:
        attention = layer.self_attn
        attention.q_proj.weight.normal_(0, 0.07)
        attention.k_proj.weight.copy_(attention.q_proj.weight)
        torch.nn.init.orthogonal_(attention.v_proj.weight)
        attention.o_proj.weight.copy_(0.1 * attention.v_proj.weight.T)


@torch.no_grad()
def _start_with_neighbours(model: LlavaForConditionalGeneration) -> None:
    """Begin where patches attend to patches that are near and look alike.

    Places are waves along both axes, as strong as the patches themselves, and queries equal keys.
    Otherwise a tower this narrow spends its training on finding out which patches touch. In the
    early layers two heads look one or two patches to the left and to the right: heads that look
    both ways alike tell which characters a sign has, but not in which order. Layers after the
    early ones begin by changing nothing, so that training can leave them out at first.
    """
    tower: Any = model.model.vision_tower
    # Its own generator: what is drawn here changes nothing that is drawn elsewhere.
    generator = torch.Generator().manual_seed(0)
    places = tower.embeddings.position_embedding.weight
    num_waves = places.shape[1] // 4
    rates = math.pi / 1.5 * (1 / 16) ** (torch.arange(num_waves) / (num_waves - 1))
    phases = torch.arange(GRID)[:, None] * rates  # (GRID, num_waves)
    waves = torch.cat([phases.sin(), phases.cos()], dim=1)
    rows = waves[:, None].expand(-1, GRID, -1)
    columns = waves[None].expand(GRID, -1, -1)
    places[0] = 0
    places[1:] = 0.3 * torch.cat([rows, columns], dim=-1).flatten(0, 1)
    for layer in tower.encoder.layers:
        attention = layer.self_attn
        attention.q_proj.weight.normal_(0, 0.06, generator=generator)
        attention.k_proj.weight.copy_(attention.q_proj.weight)
    width = tower.config.hidden_size // tower.config.num_attention_heads
    for number, layer in enumerate(tower.encoder.layers[: EARLY_LAYERS - 1]):
        attention = layer.self_attn
        reach = 1 + number % 2
        for head, shift in enumerate((reach, -reach)):
            mine = slice(head * width, (head + 1) * width)
            # A key that is turned by `shift` columns equals the query of the patch that many away.
            attention.q_proj.weight[mine] *= 1.7
            attention.k_proj.weight[mine] = attention.q_proj.weight[mine] @ _turned(rates, shift)
    for layer in tower.encoder.layers[EARLY_LAYERS:]:
        layer.self_attn.out_proj.weight.zero_()
        layer.mlp.fc2.weight.zero_()


def _turned(rates: torch.Tensor, shift: int) -> torch.Tensor:
    """Return the matrix that turns the waves of a place into those `shift` columns further on."""
    num_waves = len(rates)
    matrix = torch.eye(4 * num_waves)
    sines = torch.arange(2 * num_waves, 3 * num_waves)
    cosines = sines + num_waves
    matrix[sines, sines] = matrix[cosines, cosines] = (rates * shift).cos()
    matrix[sines, cosines] = (rates * shift).sin()
    matrix[cosines, sines] = -(rates * shift).sin()
    return matrix


def encode_pictures(
    model: LlavaForConditionalGeneration,
    pixels: torch.Tensor,
    seen: torch.Tensor | None = None,
    num_layers: int = -1,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return projected visual tokens `(B, 144, D)` and the states after each layer.

    The tokens are those of the model's own forward: the last encoder layer is skipped because
    LLaVA reads the states that enter it. States are `(B, 1 + 144, d)`, the class token first. With
    `seen` `(B, n)` the tower is shown those patches only, in their places. `num_layers` as in a
    slice.
    """
    tower: Any = model.model.vision_tower
    state = tower.embeddings(pixels)
    if seen is not None:
        places = torch.cat([torch.zeros_like(seen[:, :1]), seen + 1], dim=1)  # class token first
        state = state.gather(1, places.unsqueeze(-1).expand(-1, -1, state.shape[-1]))
    state = tower.pre_layrnorm(state)
    states = []
    for layer in tower.encoder.layers[:num_layers]:
        state = layer(state, None)
        state = state[0] if isinstance(state, tuple) else state
        states.append(state)
    return model.model.multi_modal_projector(state[:, 1:]), states
