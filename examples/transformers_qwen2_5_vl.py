"""Prune Qwen2.5-VL with Hugging Face transformers alone: no vLLM, no server.

python examples/transformers_qwen2_5_vl.py
python examples/transformers_qwen2_5_vl.py --model Qwen/Qwen2.5-VL-7B-Instruct \
    --profile qwen2.5-vl my.png "What does the sign say?" --retention 0.222
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration
from transformers.vision_utils import get_vision_window_index

from msdg_vllm.core import prune_image
from msdg_vllm.core.profiles import EncoderProfile, built_in_profile

ROOT = Path(__file__).resolve().parents[1]
BUNDLED = ROOT / "models" / "scenes-qwen"


def encode(
    tower: Any, pixels: Tensor, grid: Tensor, profile: EncoderProfile
) -> tuple[dict[int, Tensor], Tensor]:
    """Run the encoder once; return the states that the profile names, and the visual tokens."""
    entering: dict[int, Tensor] = {}
    hooks = [
        tower.blocks[layer].register_forward_pre_hook(
            lambda _, given, layer=layer: entering.update({layer: given[0].clone()})
        )
        for layer in profile.layers
        if layer < len(tower.blocks)
    ]
    output = tower(pixels, grid_thw=grid)
    for hook in hooks:
        hook.remove()
    entering[len(tower.blocks)] = output.last_hidden_state
    # Inside, tokens stand window by window, four patches each; outside, row by row.
    windows, _ = get_vision_window_index(
        grid,
        spatial_merge_size=tower.spatial_merge_size,
        window_size=tower.window_size,
        patch_size=tower.patch_size,
    )
    order = windows.argsort()
    states = {
        layer: entering[layer].view(len(order), -1, entering[layer].shape[-1])[order].flatten(0, 1)
        for layer in profile.layers
    }
    return states, output.pooler_output


@torch.inference_mode()
def ask(
    model: Any,
    processor: Any,
    profile: EncoderProfile,
    image: Image.Image,
    question: str,
    retention: float,
) -> tuple[str, Tensor]:
    """Return the answer, and which of the image's tokens the language model saw for it."""
    parts = [{"type": "image"}, {"type": "text", "text": question}]
    chat = processor.apply_chat_template(
        [{"role": "user", "content": parts}], add_generation_prompt=True
    )
    inputs = processor(images=image, text=chat, return_tensors="pt").to(model.device)
    tower = model.model.visual
    pixels = inputs.pixel_values.to(tower.dtype)
    states, visual = encode(tower, pixels, inputs.image_grid_thw, profile)

    # What to keep for this question.
    embed = model.get_input_embeddings()
    words = processor.tokenizer(question, add_special_tokens=False, return_tensors="pt").input_ids
    query = embed(words.to(model.device))[0]
    patches = tower.spatial_merge_size**2
    keep = prune_image(states, visual, query, profile, retention, patches)

    # The prompt without the rest; what is left keeps the positions of the whole one.
    positions, _ = model.model.get_rope_index(
        inputs.input_ids, inputs.mm_token_type_ids, image_grid_thw=inputs.image_grid_thw
    )
    tokens = inputs.input_ids[0]
    places = (tokens == model.config.image_token_id).nonzero()[:, 0]
    stays = torch.ones_like(tokens, dtype=torch.bool)
    stays[places] = False
    stays[places[keep]] = True
    embeddings = embed(tokens)
    embeddings[places] = visual.to(embeddings.dtype)
    prompt = embeddings[stays].unsqueeze(0)
    said = model.generate(
        inputs_embeds=prompt,
        attention_mask=torch.ones(prompt.shape[:2], device=model.device),
        position_ids=positions[:, :, stays],
        do_sample=False,
        max_new_tokens=64,
    )
    return processor.decode(said[0], skip_special_tokens=True).strip(), keep


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("picture", nargs="?", type=Path, default=ROOT / "examples" / "square.png")
    parser.add_argument("question", nargs="?", default="What does the sign say?")
    parser.add_argument("--model", default=str(BUNDLED))
    parser.add_argument(
        "--profile", default=str(BUNDLED / "msdg_profile.json"), help="a file, or a built-in name"
    )
    parser.add_argument("--retention", type=float, default=0.111)
    given = parser.parse_args()
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(given.model, dtype="auto").eval()
    processor = AutoProcessor.from_pretrained(given.model)
    is_file = Path(given.profile).is_file()
    profile = EncoderProfile.load(given.profile) if is_file else built_in_profile(given.profile)
    image = Image.open(given.picture).convert("RGB")
    answer, keep = ask(model, processor, profile, image, given.question, given.retention)
    print(f"{answer}\n{len(keep)} visual tokens: {keep.tolist()}")


if __name__ == "__main__":
    main()
