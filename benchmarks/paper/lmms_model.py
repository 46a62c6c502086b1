"""lmms-eval with one more model: its OpenAI-compatible one, whose requests say what to prune.

    python -m benchmarks.paper.lmms_model --model msdg --model_args base_url=...,retention=0.222 ...

takes every option of `python -m lmms_eval`. This module runs in lmms-eval's environment, and
nothing else of this package imports it: lmms-eval's own model has no way to add a field to a
request.
"""

import os
import uuid
from typing import Any

from lmms_eval.models import MODEL_REGISTRY_V2
from lmms_eval.models.chat.openai import OpenAICompatible
from lmms_eval.models.registry_v2 import ModelManifest

MODEL_ID = "msdg"


class PrunedEndpoint(OpenAICompatible):
    """lmms-eval's OpenAI-compatible model, with `retention` and `pruning.method` in every request.

    Args:
        retention: The fraction of visual tokens to keep.
        method: Which selector decides.
        alone: Whether nothing may be taken from a cache of the server, to measure latency.
        arguments: Those of lmms-eval's model.
    """

    def __init__(
        self, retention: float, method: str, alone: bool = False, **arguments: Any
    ) -> None:
        # The variable that vLLM's server reads too. OPENAI_API_KEY stays with the judges of tasks.
        super().__init__(api_key=os.environ.get("VLLM_API_KEY") or "none", **arguments)
        pruning = {"retention": float(retention), "pruning": {"method": method}}
        completions = self.client.chat.completions
        send = completions.create

        def create(**payload: Any) -> Any:
            body = {**payload.pop("extra_body", {}), **pruning}
            # lmms-eval drops the temperature for any model with "o1" or "o3" in its name or path.
            payload.setdefault("temperature", 0)
            if alone:
                body["cache_salt"] = uuid.uuid4().hex
                _rename_images(payload["messages"])
            return send(**payload, extra_body=body)

        completions.create = create


def _rename_images(messages: list[dict[str, Any]]) -> None:
    """Give each image a name of its own, by which vLLM's caches cannot know it again."""
    for message in messages:
        for part in message["content"]:
            if part["type"] == "image_url":
                part["uuid"] = uuid.uuid4().hex


def main() -> None:
    # Imported late: it configures logging and torch for the whole process.
    from lmms_eval.__main__ import cli_evaluate

    path = f"benchmarks.paper.lmms_model.{PrunedEndpoint.__name__}"
    MODEL_REGISTRY_V2.register_manifest(ModelManifest(MODEL_ID, chat_class_path=path))
    cli_evaluate()


if __name__ == "__main__":
    main()
