"""OpenVINO GenAI as a process that answers questions about pictures; runs in its environment.

Exports the checkpoint unless that was done before, says which versions it has, then reads one JSON
object per line (`picture`, `pruning_ratio`, `max_tokens`) and writes one with what it took.
"""

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("openvino", "openvino-genai", "optimum-intel", "transformers")


def export(checkpoint: Path, folder: Path) -> None:
    """Convert a Qwen2.5-VL checkpoint of today's transformers, and its tokenizer."""
    import openvino
    from openvino_tokenizers import convert_tokenizer
    from optimum.intel import OVModelForVisualCausalLM
    from transformers import AutoProcessor

    source = folder.with_name(f"{folder.name}-source")
    source.mkdir(parents=True, exist_ok=True)
    for path in checkpoint.iterdir():
        text = _for_older_transformers(path.name, path)
        (source / path.name).write_bytes(path.read_bytes() if text is None else text.encode())
    model: Any = OVModelForVisualCausalLM.from_pretrained(source, export=True, compile=False)
    model.save_pretrained(folder)
    processor: Any = AutoProcessor.from_pretrained(source)
    processor.save_pretrained(folder)
    tokenizer, detokenizer = convert_tokenizer(processor.tokenizer, with_detokenizer=True)
    openvino.save_model(tokenizer, folder / "openvino_tokenizer.xml")
    openvino.save_model(detokenizer, folder / "openvino_detokenizer.xml")


def _for_older_transformers(name: str, path: Path) -> str | None:
    """The text of a file whose form the older version does not know; None leaves it as it is."""
    if name == "config.json":
        config = json.loads(path.read_text())
        rope = config["text_config"].pop("rope_parameters")
        config["text_config"]["rope_theta"] = rope.pop("rope_theta")
        config["text_config"]["rope_scaling"] = {**rope, "type": "default"}
        return json.dumps(config)
    if name == "tokenizer_config.json":
        config = {**json.loads(path.read_text()), "tokenizer_class": "Qwen2TokenizerFast"}
        config["additional_special_tokens"] = config.pop("extra_special_tokens", [])
        return json.dumps(config)
    return None


def serve(folder: Path, threads: int) -> None:
    """Answer what comes on standard input until it ends."""
    import numpy
    import openvino
    import openvino_genai
    from PIL import Image

    pipeline: Any = openvino_genai.VLMPipeline(str(folder), "CPU", INFERENCE_NUM_THREADS=threads)
    print(json.dumps({name: version(name) for name in PACKAGES}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        start = time.perf_counter()
        with Image.open(asked["picture"]) as picture:
            pixels = openvino.Tensor(numpy.asarray(picture.convert("RGB"))[None])
        decoding = time.perf_counter() - start
        wanted = openvino_genai.GenerationConfig()
        wanted.max_new_tokens, wanted.ignore_eos = asked["max_tokens"], True
        wanted.pruning_ratio = asked["pruning_ratio"]
        start = time.perf_counter()
        answer = pipeline.generate(asked["question"], images=[pixels], generation_config=wanted)
        took = {
            "decoding": decoding,
            "ttft": answer.perf_metrics.get_ttft().mean / 1000,
            "latency": time.perf_counter() - start,
            "prompt_tokens": answer.perf_metrics.get_num_input_tokens(),
        }
        print(json.dumps(took), flush=True)


def main() -> None:
    """Export if need be, then answer."""
    checkpoint, folder, threads = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    if not (folder / "openvino_detokenizer.xml").is_file():
        export(checkpoint, folder)
    serve(folder, threads)


if __name__ == "__main__":
    main()
