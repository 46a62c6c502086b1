"""How many visual tokens a request brought, and how many the language model saw."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from msdg_vllm.engine.api.processor import SPECS


@dataclass(frozen=True, slots=True)
class VisualTokens:
    """Visual tokens of the images and videos of a request.

    Attributes:
        total: Tokens before pruning.
        kept: Tokens the language model saw.
        items: Images and videos.
        pruned_items: Those of them that lost tokens.
        methods: Names of the methods that chose, in alphabetical order.
    """

    total: int = 0
    kept: int = 0
    items: int = 0
    pruned_items: int = 0
    methods: tuple[str, ...] = ()

    @classmethod
    def of_input(cls, engine_input: Mapping[str, Any]) -> VisualTokens:
        """Count the tokens of a rendered prompt: its placeholders, and what they stand for."""
        total = kept = items = pruned_items = 0
        specs = engine_input.get(SPECS) or {}
        for modality, placeholders in (engine_input.get("mm_placeholders") or {}).items():
            if modality not in specs:
                continue
            for placeholder, spec in zip(placeholders, specs[modality], strict=True):
                # The placeholders of a pruned video may stand for its timestamps too.
                num_kept = spec.budget or placeholder.get_num_embeds()
                kept += num_kept
                total += (spec.scaled_from or spec.num_tokens) if spec.budget else num_kept
                items += 1
                pruned_items += bool(spec.budget)
        methods = {spec.method for found in specs.values() for spec in found if spec.budget}
        return cls(total, kept, items, pruned_items, tuple(sorted(methods)))

    @classmethod
    def sum(cls, counts: Iterable[VisualTokens]) -> VisualTokens:
        """Add up the counts of several prompts."""
        total = cls()
        for count in counts:
            total = cls(
                total.total + count.total,
                total.kept + count.kept,
                total.items + count.items,
                total.pruned_items + count.pruned_items,
                tuple(sorted({*total.methods, *count.methods})),
            )
        return total

    def as_details(self) -> dict[str, int]:
        """Return the keys that join the details of a usage."""
        return {"visual_tokens": self.kept, "visual_tokens_total": self.total}

    def as_span_attributes(self) -> dict[str, str | int | float]:
        """Return the attributes that join those of a request's span in a trace."""
        return {
            "msdg.retention": round(self.kept / self.total, 4) if self.total else 1.0,
            "msdg.method": ",".join(self.methods),
            "msdg.visual_tokens": self.kept,
            "msdg.visual_tokens_total": self.total,
        }
