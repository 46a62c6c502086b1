"""From a request's wishes to the spec of each of its items."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm.multimodal.parse import DictEmbeddingItems, EmbeddingItems

from msdg_vllm.core import num_kept_tokens
from msdg_vllm.core.errors import RequestError
from msdg_vllm.engine.api.budgets import Budgeting, OpenItem, largest_retention
from msdg_vllm.engine.api.pixels import content_number
from msdg_vllm.engine.api.queries import LazyTurns
from msdg_vllm.engine.encoder import profiled_method
from msdg_vllm.engine.spec import UNPRUNED, PruningSpec
from msdg_vllm.methods import method_named
from msdg_vllm.request import AUTO, ItemTurn, PruningRequest, Turns

if TYPE_CHECKING:
    from msdg_vllm.engine.api.processor import PruningProcessor

Specs = Mapping[str, Sequence[PruningSpec]]
"""Specs of the items of a prompt, by modality."""

Scaled = tuple[Any, Specs, dict[str, object]]
"""Items of a prompt of which some were scaled, their specs, and the processor kwargs for them."""


@dataclass(frozen=True, slots=True)
class _Item:
    """An image or video of a prompt, of a modality that can be pruned."""

    processor: PruningProcessor
    all: Any  # the items of its modality
    modality: str
    index: int
    kwargs: Mapping[str, object]
    turn: ItemTurn

    @property
    def is_embedded(self) -> bool:
        """Whether it came as embeddings, without pixels."""
        return isinstance(self.all, EmbeddingItems | DictEmbeddingItems)

    @property
    def num_tokens(self) -> int:
        """Tokens that the encoder gives for it."""
        return self.processor.num_visual_tokens(self.all, self.modality, self.index, self.kwargs)

    def budget(self, retention: float) -> int:
        """Tokens to keep of it; at retention 1, all that pruning could ever keep."""
        return self.processor.budget(self.all, self.modality, self.index, self.kwargs, retention)


class Specifier:
    """Writes the specs of a prompt; geometry and tokenizer are its processor's."""

    def __init__(self, processor: PruningProcessor) -> None:
        self._processor = processor
        self._offer = processor.offer
        self._budgeting = Budgeting(self._offer.settings)

    def specs(
        self,
        request: PruningRequest,
        turns: Turns | LazyTurns,
        inputs: Any,
        kwargs: Mapping[str, object],
    ) -> tuple[Specs, Any]:
        """Return the specs of all items, and what stands for the request while it waits."""
        if request.explanation and not self._offer.settings.explain:
            raise RequestError(
                "pruning.explain is turned off on this server (--no-explain); leave it out",
                parameter="pruning.explain",
            )
        self._check_others(request, turns, inputs)
        items = self._items(inputs, kwargs, turns)
        chosen, reservation = self._choose(request, turns, items, len(inputs.prompt))
        # Images are counted first, then videos.
        specs = [
            self._spec(request, turns, item, number, chosen.get((item.modality, item.index)))
            for number, item in enumerate(items)
        ]
        self._check_total(items, specs)
        return _by_modality(items, specs), reservation

    def profiling(self, inputs: Any, kwargs: Mapping[str, object]) -> Specs:
        """Return specs that keep every token, but by the way of a pruned item."""
        method = profiled_method(self._offer.methods, self._offer.encoder)
        items = self._items(inputs, kwargs)
        return _by_modality(
            items, [PruningSpec(item.budget(1.0), item.num_tokens, method=method) for item in items]
        )

    def fitting_retention(self, processed: Any, inputs: Any, kwargs: Mapping[str, object]) -> float:
        """The largest retention at which a prompt would leave room for an answer; 0 for none."""
        placeholders = [one for each in processed["mm_placeholders"].values() for one in each]
        items = [item for item in self._items(inputs, kwargs) if not item.is_embedded]
        if len(items) < len(placeholders):
            return 0.0  # what cannot be pruned takes its place too
        num_visual = sum(placeholder.get_num_embeds() for placeholder in placeholders)
        num_text = len(processed["prompt_token_ids"]) - num_visual
        room = self._processor.info.ctx.model_config.max_model_len - 1 - num_text
        fitting = largest_retention(room, lambda r: sum(item.budget(r) for item in items))
        return fitting or 0.0

    def _items(
        self, inputs: Any, kwargs: Mapping[str, object], turns: Turns | LazyTurns | None = None
    ) -> list[_Item]:
        turns = turns or Turns()
        return [
            _Item(self._processor, own, modality, index, kwargs, turns.item(modality, index))
            for modality, own in inputs.mm_data_items.items()
            if modality in self._processor.modalities
            for index in range(own.get_count())
        ]

    def _check_others(self, request: PruningRequest, turns: Turns | LazyTurns, inputs: Any) -> None:
        """Refuse to prune items that the code of this model does not prune."""
        prunable = self._processor.modalities
        for modality, items in inputs.mm_data_items.items():
            for index in range(0 if modality in prunable else items.get_count()):
                retention = self._budgeting.retention_of(turns.item(modality, index), request)
                if retention is not None and retention < 1:
                    raise RequestError(
                        f"retention {retention} cannot be applied to {modality} {index}: of this "
                        f"model only {' and '.join(prunable)} items are pruned; send retention "
                        f"1.0 with the {modality}",
                        parameter="retention",
                    )

    def _choose(
        self,
        request: PruningRequest,
        turns: Turns | LazyTurns,
        items: Sequence[_Item],
        num_prompt_tokens: int,
    ) -> tuple[Mapping[tuple[str, int], float], Any]:
        """Ask whoever decides about the items that name no retention."""
        items = [item for item in items if not item.is_embedded]
        chooser = self._processor.chooser
        if chooser is None:
            if AUTO in (request.retention, *(item.turn.retention for item in items)):
                raise RequestError(
                    'retention "auto" needs a server with a target for the time to first token '
                    "(--target-ttft), and this one has none; send a number in (0, 1]",
                    parameter="retention",
                )
            return {}, None
        if not items:
            return {}, None
        kept, total = 0, 0
        undecided: list[tuple[_Item, OpenItem]] = []
        for item in items:
            num_tokens = item.num_tokens
            total += num_tokens
            most = self._budgeting.most(item.turn, request)
            retention = self._budgeting.retention_of(item.turn, request)
            if retention is not None:
                kept += min(num_kept_tokens(num_tokens, retention), most or num_tokens)
                continue
            content = content_number(item.all.get(item.index))
            query = self._query(request, turns, item)
            identity = repr((content, query, request.method, request.scope))
            undecided.append((item, OpenItem(identity, num_tokens, most)))

        def budgets(retention: float) -> list[int]:
            return [
                self._budgeting.budget(retention, item.turn, request, item.budget)
                for item, _ in undecided
            ]

        ceiling = self._budgeting.ceiling(kept, lambda retention: sum(budgets(retention)))
        asked = [item for _, item in undecided]
        if ceiling < 1:
            most_each = budgets(ceiling)
            asked = [replace(item, most=most) for item, most in zip(asked, most_each, strict=True)]
        retentions, reservation = chooser.choose(asked, num_prompt_tokens + kept, total)
        return {
            (item.modality, item.index): min(retention, ceiling)
            for (item, _), retention in zip(undecided, retentions, strict=True)
        }, reservation

    def _spec(
        self,
        request: PruningRequest,
        turns: Turns | LazyTurns,
        item: _Item,
        number: int,
        chosen: float | None,
    ) -> PruningSpec:
        retention = self._budgeting.retention_of(item.turn, request)
        if retention is None:
            retention = self._offer.settings.default_retention if chosen is None else chosen
        if item.is_embedded and retention < 1:
            raise RequestError(
                f"retention {retention} needs pixels, but {item.modality} {item.index} came as "
                "precomputed embeddings, which carry no encoder states; send retention 1.0 with "
                "them",
                parameter="retention",
            )
        is_whole = retention == 1 and self._budgeting.most(item.turn, request) is None
        if item.is_embedded or is_whole:
            return UNPRUNED
        budget = self._budgeting.budget(retention, item.turn, request, item.budget)
        if budget == item.budget(1.0):
            return UNPRUNED
        assert request.method is not None
        method, num_tokens = method_named(request.method), item.num_tokens
        if method.max_tokens is not None and num_tokens > method.max_tokens:
            raise RequestError(
                f"method {request.method!r} takes {item.modality} items of up to "
                f"{method.max_tokens} tokens, for lack of memory, and {item.modality} {item.index} "
                f"has {num_tokens}; send a smaller one, or another method such as "
                f"{self._offer.default_method!r}",
                parameter="pruning.method",
            )
        draws = method.needs(self._offer.encoder).seed
        return PruningSpec(
            budget=budget,
            num_tokens=num_tokens,
            query_ids=self._query_ids(self._query(request, turns, item)),
            method=request.method,
            scope=request.scope,
            seed=content_number(item.all.get(item.index)) if draws else 0,
            explanation=request.explanation,
            item=number if request.explanation else 0,
        )

    def _query(self, request: PruningRequest, turns: Turns | LazyTurns, item: _Item) -> str:
        assert request.method is not None
        if (
            request.query_mode == "none"
            or not method_named(request.method).needs(self._offer.encoder).query
        ):
            # All questions then share one selection, and one place in every cache.
            return ""
        if request.query is not None:
            return request.query
        mode = request.query_mode or self._offer.settings.query_mode
        return turns.query(mode, item.modality, item.index)

    def _check_total(self, items: Sequence[_Item], specs: Sequence[PruningSpec]) -> None:
        """Refuse a request that keeps more than the operator allows one to keep."""
        if self._offer.settings.max_visual_tokens_per_request is None:
            return
        pairs = zip(items, specs, strict=True)
        kept = [spec.budget or item.budget(1.0) for item, spec in pairs if not item.is_embedded]
        with_pixels = [item for item in items if not item.is_embedded]
        self._budgeting.check_total(
            sum(kept), lambda retention: sum(item.budget(retention) for item in with_pixels)
        )

    def _query_ids(self, query: str) -> tuple[int, ...]:
        if not query.strip():
            return ()
        token_ids = self._processor.info.get_tokenizer().encode(
            query.strip(), add_special_tokens=False
        )
        return tuple(sorted(set(token_ids)))


def _by_modality(items: Iterable[_Item], specs: Iterable[PruningSpec]) -> Specs:
    by_modality: defaultdict[str, list[PruningSpec]] = defaultdict(list)
    for item, spec in zip(items, specs, strict=True):
        by_modality[item.modality].append(spec)
    return dict(by_modality)
