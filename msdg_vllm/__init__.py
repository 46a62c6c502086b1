"""Visual token pruning for vLLM: every request chooses how much of its images to keep.

Importing this package is cheap and free of side effects; vLLM calls `register()` through the
`vllm.general_plugins` entry point in every process it starts.
"""

__all__ = ["ARCHITECTURES", "__version__", "register"]
__version__ = "0.1.0"

ARCHITECTURES = {
    "Gemma3ForConditionalGeneration": "msdg_vllm.models.gemma3:PruningGemma3",
    "Glm4vForConditionalGeneration": "msdg_vllm.models.glm4v:PruningGlm4v",
    "Glm4vMoeForConditionalGeneration": "msdg_vllm.models.glm4v:PruningGlm4vMoe",
    "InternVLChatModel": "msdg_vllm.models.internvl:PruningInternVLChat",
    "InternVLForConditionalGeneration": "msdg_vllm.models.internvl:PruningInternVLHf",
    "KimiVLForConditionalGeneration": "msdg_vllm.models.kimi_vl:PruningKimiVL",
    "LlavaForConditionalGeneration": "msdg_vllm.models.llava:PruningLlava",
    "LlavaNextForConditionalGeneration": "msdg_vllm.models.llava_next:PruningLlavaNext",
    "MGMLlamaForCausalLM": "msdg_vllm.models.mini_gemini.pruning:PruningMiniGemini",
    "MiniGeminiLlamaForCausalLM": "msdg_vllm.models.mini_gemini.pruning:PruningMiniGemini",
    "Qwen2VLForConditionalGeneration": "msdg_vllm.models.qwen2_vl:PruningQwen2VL",
    "Qwen2_5_VLForConditionalGeneration": "msdg_vllm.models.qwen2_5_vl:PruningQwen2_5_VL",
    "Qwen3VLForConditionalGeneration": "msdg_vllm.models.qwen3_vl:PruningQwen3VL",
    "Qwen3VLMoeForConditionalGeneration": "msdg_vllm.models.qwen3_vl:PruningQwen3VLMoe",
    "Qwen3_5ForConditionalGeneration": "msdg_vllm.models.qwen3_5:PruningQwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "msdg_vllm.models.qwen3_5:PruningQwen3_5Moe",
}
"""Architectures this plugin serves, with the class that replaces vLLM's."""


def register() -> None:
    """Put the pruned models in vLLM's registry; calling it again changes nothing."""
    from multiprocessing import parent_process

    from msdg_vllm.engine.hooks import check_vllm, probe

    check_vllm()
    if parent_process() is None:  # once is enough, and the others start later
        probe()

    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.renderers.registry import RENDERER_REGISTRY

    from msdg_vllm.engine import scheduling, tracing
    from msdg_vllm.engine.api import batch, pixels
    from msdg_vllm.engine.parent import die_with_parent
    from msdg_vllm.engine.worker import rpc
    from msdg_vllm.models.mini_gemini.config import register_configs
    from msdg_vllm.settings import Settings

    die_with_parent()
    Settings.from_environment()
    for architecture, model_class in ARCHITECTURES.items():
        ModelRegistry.register_model(architecture, model_class)
    register_configs()
    rpc.install()
    scheduling.install()
    tracing.install_in_scheduler()
    batch.install()
    pixels.install()
    # Not `register()`: it warns about every mode that exists already.
    RENDERER_REGISTRY.renderers["hf"] = ("msdg_vllm.engine.api.renderer", "PruningRenderer")
