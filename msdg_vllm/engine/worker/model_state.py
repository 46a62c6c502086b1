"""What vLLM's V2 model runner keeps about the requests of a pruned model with M-RoPE.

Its stock state asks the model for positions and for what decoding adds to an index, at every
prefill of an image. The latter is an integer on the host, so that a model would have to read it
off the device. Here it stays what it was when the request came: pruning does not change it.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.multimodal.utils import copy_mm_embedding_modality
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.mm_pruning import MultiModalPruner

from msdg_vllm.engine.worker.positions import carries_positions, settle_positions


class PositionPlacer(MultiModalPruner):
    """Settles the positions of kept tokens on the device, and only where there are any."""

    def recompute(
        self, mm_embeds: list[torch.Tensor], input_batch: Any, req_states: Any
    ) -> list[torch.Tensor]:
        if not carries_positions(mm_embeds, self.inputs_embeds_size):
            return mm_embeds
        clean: list[torch.Tensor] = []
        for req_id, req_idx, prefill_len, start, num_scheduled in zip(
            input_batch.req_ids,
            input_batch.idx_mapping_np.tolist(),
            input_batch.prefill_len_np.tolist(),
            input_batch.num_computed_prefill_tokens_np.tolist(),
            input_batch.num_scheduled_tokens.tolist(),
            strict=False,
        ):
            count = self._num_window_embeds(req_id, start, start + num_scheduled)
            own = mm_embeds[len(clean) : len(clean) + count]
            rows = own
            if carries_positions(own, self.inputs_embeds_size):
                held = self.rope_state.read_prefill_positions(req_idx, prefill_len)
                rows, placed = settle_positions(held.long(), own, start, self.inputs_embeds_size)
                held.copy_(placed)
            clean += [
                copy_mm_embedding_modality(source, row)
                for source, row in zip(own, rows, strict=True)
            ]
        assert len(clean) == len(mm_embeds)
        return clean


class PruningModelState(DefaultModelState):
    """The default state, with positions placed by `PositionPlacer`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.mm_pruner is not None:
            stock = self.mm_pruner
            model: Any = stock.model
            # The row of an unpruned token may be wider than an embedding, by deepstack levels.
            self.mm_pruner = PositionPlacer(
                model, stock.rope_state, stock.encoder_cache, model.row_width
            )
