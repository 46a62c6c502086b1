"""Prune LLaVA-1.5 with Hugging Face transformers alone: no vLLM, no server.

python examples/transformers_llava.py
python examples/transformers_llava.py --model llava-hf/llava-1.5-7b-hf \
    --profile clip-vit-large-patch14-336 my.png "What does the sign say?" --retention 0.111
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoProcessor, LlavaForConditionalGeneration

from msdg_vllm.core import prune_image
from msdg_vllm.core.profiles import EncoderProfile, built_in_profile

ROOT = Path(__file__).resolve().parents[1]
BUNDLED = ROOT / "models" / "scenes-llava"


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

    # The encoder, once, with its states; the first token of a CLIP tower shows no patch.
    pixels = inputs.pixel_values.to(model.dtype)
    tower = model.model.vision_tower(pixels, output_hidden_states=True)
    states = {layer: tower.hidden_states[layer][0, 1:] for layer in profile.layers}
    features = tower.hidden_states[model.config.vision_feature_layer][:, 1:]
    visual = model.model.multi_modal_projector(features)[0]

    # What to keep for this question.
    embed = model.get_input_embeddings()
    words = processor.tokenizer(question, add_special_tokens=False, return_tensors="pt").input_ids
    keep = prune_image(states, visual, embed(words.to(model.device))[0], profile, retention)

    # The prompt without the rest: positions are counted, so nothing else changes.
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
    model = LlavaForConditionalGeneration.from_pretrained(given.model, dtype="auto").eval()
    processor = AutoProcessor.from_pretrained(given.model)
    is_file = Path(given.profile).is_file()
    profile = EncoderProfile.load(given.profile) if is_file else built_in_profile(given.profile)
    image = Image.open(given.picture).convert("RGB")
    answer, keep = ask(model, processor, profile, image, given.question, given.retention)
    print(f"{answer}\n{len(keep)} visual tokens: {keep.tolist()}")


if __name__ == "__main__":
    main()
