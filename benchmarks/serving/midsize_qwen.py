"""A Qwen2.5-VL of middle size with random weights, for measuring time where there is no GPU.

As `midsize.py` is for LLaVA-1.5: the shape of the real one (an encoder with windows, four patches
to a token, any resolution) at widths that two cores can run. Tokenizer and template are those of
the bundled Qwen-style model. What it says means nothing.
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.shared.provenance import ROOT, RUNS

FOLDER = RUNS / "midsize-qwen"
BUNDLED = ROOT / "models" / "scenes-qwen"
PICTURE_SIZE = (672, 672)
"""A picture of 24 x 24 tokens."""

VISION = {
    "depth": 16,
    "fullatt_block_indexes": [3, 7, 11, 15],
    "hidden_size": 320,
    "intermediate_size": 864,
    "num_heads": 5,
    "out_hidden_size": 896,
    "patch_size": 14,
    "window_size": 112,
}
TEXT = {
    "hidden_size": 896,
    "intermediate_size": 2432,
    "num_attention_heads": 14,
    "num_hidden_layers": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "layer_types": ["full_attention"] * 16,
}
PIXELS = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
PROFILE = {
    "direction_layers": [1, 15],
    "saliency_window": [9, 12],
    "sink_layer": 8,
    "sink_coordinate": 3,
    "sink_threshold": 2.5,
    "num_groups": 20,
    "seed": 0,
}


def build(folder: Path = FOLDER) -> Path:
    """Write the checkpoint, unless the folder holds one of the same sizes already."""
    stamp = folder / "proportions.json"
    wanted = {"vision": VISION, "text": TEXT, "pixels": PIXELS, "profile": PROFILE}
    if stamp.is_file() and json.loads(stamp.read_text()) == wanted:
        return folder
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

    config: Any = AutoConfig.from_pretrained(BUNDLED)
    for part, sizes in ((config.vision_config, VISION), (config.text_config, TEXT)):
        for name, value in sizes.items():
            setattr(part, name, value)
    config.text_config.rope_parameters = {
        "mrope_section": [8, 12, 12],
        "rope_theta": 1e6,
        "rope_type": "default",
    }
    torch.manual_seed(0)
    model: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    processor: Any = AutoProcessor.from_pretrained(BUNDLED)
    for sizes in (processor.image_processor, processor.video_processor):
        sizes.patch_size, sizes.size = VISION["patch_size"], PIXELS
    processor.save_pretrained(folder)
    (folder / "msdg_profile.json").write_text(json.dumps(PROFILE))
    stamp.write_text(json.dumps(wanted))
    return folder
