"""From a request's wishes to the spec of each of its items."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from vllm.multimodal.parse import DictEmbeddingItems, EmbeddingItems

from msdg_vllm.core import num_kept_tokens
from msdg_vllm.core.errors import RequestError
from msdg_vllm.engine.api.budgets import Budgeting, OpenItem, largest_retention
from msdg_vllm.engine.api.pixels import content_key, content_number
from msdg_vllm.engine.api.queries import LazyTurns
from msdg_vllm.engine.encoder import profiled_method
from msdg_vllm.engine.spec import UNPRUNED, PruningSpec
from msdg_vllm.methods import method_named
from msdg_vllm.request import AUTO, PruningRequest, Turns

if TYPE_CHECKING:
    from msdg_vllm.engine.api.processor import PruningProcessor

Specs = Mapping[str, Sequence[PruningSpec]]
"""Specs of the items of a prompt, by modality."""

Scaled = tuple[Any, Specs, dict[str, object]]
"""Items of a prompt of which some were scaled, their specs, and the processor kwargs for them."""


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
        chosen, reservation = self._choose(request, turns, inputs, kwargs)
        specs: Specs = {
            modality: [
                self._spec(
                    request, turns, items, modality, index, kwargs, chosen.get((modality, index))
                )
                for index in range(items.get_count())
            ]
            for modality, items in self._prunable(inputs)
        }
        self._check_total(specs, inputs, kwargs)
        assert request.method is not None
        if method_named(request.method).needs(self._offer.encoder).seed:
            specs = _seeded(specs, inputs.mm_data_items)
        if request.explanation:
            specs = _numbered(specs)
        return specs, reservation

    def profiling(self, inputs: Any, kwargs: Mapping[str, object]) -> Specs:
        """Return specs that keep every token, but by the way of a pruned item."""
        method = profiled_method(self._offer.methods, self._offer.encoder)
        return {
            modality: [
                PruningSpec(
                    budget=self._processor.budget(items, modality, index, kwargs, 1.0),
                    num_tokens=self._processor.num_visual_tokens(items, modality, index, kwargs),
                    method=method,
                )
                for index in range(items.get_count())
            ]
            for modality, items in self._prunable(inputs)
        }

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

    def fitting_retention(self, processed: Any, inputs: Any, kwargs: Mapping[str, object]) -> float:
        """The largest retention at which a prompt would leave room for an answer; 0 for none."""
        placeholders = [one for each in processed["mm_placeholders"].values() for one in each]
        budgets: list[Callable[[float], int]] = []
        for modality, items in self._prunable(inputs):
            if not isinstance(items, EmbeddingItems | DictEmbeddingItems):
                budgets += [
                    partial(self._processor.budget, items, modality, index, kwargs)
                    for index in range(items.get_count())
                ]
        if len(budgets) < len(placeholders):
            return 0.0  # what cannot be pruned takes its place too
        num_visual = sum(placeholder.get_num_embeds() for placeholder in placeholders)
        num_text = len(processed["prompt_token_ids"]) - num_visual
        room = self._processor.info.ctx.model_config.max_model_len - 1 - num_text
        return (
            largest_retention(room, lambda retention: sum(kept(retention) for kept in budgets))
            or 0.0
        )

    def _prunable(self, inputs: Any) -> Iterator[tuple[str, Any]]:
        for modality, items in inputs.mm_data_items.items():
            if modality in self._processor.modalities:
                yield modality, items

    def _choose(
        self,
        request: PruningRequest,
        turns: Turns | LazyTurns,
        inputs: Any,
        kwargs: Mapping[str, object],
    ) -> tuple[Mapping[tuple[str, int], float], Any]:
        """Ask whoever decides about the items that name no retention."""
        places = [
            (modality, items, index)
            for modality, items in self._prunable(inputs)
            if not isinstance(items, EmbeddingItems | DictEmbeddingItems)
            for index in range(items.get_count())
        ]
        chooser = self._processor.chooser
        if chooser is None:
            wished = [request.retention, *(turns.item(m, i).retention for m, _, i in places)]
            if AUTO in wished:
                raise RequestError(
                    'retention "auto" needs a server with a target for the time to first token '
                    "(--target-ttft), and this one has none; send a number in (0, 1]",
                    parameter="retention",
                )
            return {}, None
        if not places:
            return {}, None
        kept, total = 0, 0
        open_items: dict[tuple[str, int], OpenItem] = {}
        budgets: list[Callable[[float], int]] = []
        for modality, items, index in places:
            num_tokens = self._processor.num_visual_tokens(items, modality, index, kwargs)
            total += num_tokens
            turn = turns.item(modality, index)
            most = self._budgeting.most(turn, request)
            retention = self._budgeting.retention_of(turn, request)
            if retention is not None:
                kept += min(num_kept_tokens(num_tokens, retention), most or num_tokens)
                continue
            query = self._query(request, turns, modality, index)
            content = content_number(items.get(index))
            identity = repr((content, query, request.method, request.scope))
            open_items[modality, index] = OpenItem(identity, num_tokens, most)
            budget_at = partial(self._processor.budget, items, modality, index, kwargs)
            budgets.append(
                partial(self._budgeting.budget, item=turn, request=request, budget_at=budget_at)
            )
        ceiling = self._budgeting.ceiling(
            kept, lambda retention: sum(budget(retention) for budget in budgets)
        )
        asked = [
            replace(item, most=budget(ceiling)) if ceiling < 1 else item
            for item, budget in zip(open_items.values(), budgets, strict=True)
        ]
        retentions, reservation = chooser.choose(asked, len(inputs.prompt) + kept, total)
        within = [min(retention, ceiling) for retention in retentions]
        return dict(zip(open_items, within, strict=True)), reservation

    def _spec(
        self,
        request: PruningRequest,
        turns: Turns | LazyTurns,
        items: Any,
        modality: str,
        index: int,
        kwargs: Mapping[str, object],
        chosen: float | None,
    ) -> PruningSpec:
        turn = turns.item(modality, index)
        retention = self._budgeting.retention_of(turn, request)
        if retention is None:
            retention = self._offer.settings.default_retention if chosen is None else chosen
        budget_at = partial(self._processor.budget, items, modality, index, kwargs)
        is_embedded = isinstance(items, EmbeddingItems | DictEmbeddingItems)
        if is_embedded and retention < 1:
            raise RequestError(
                f"retention {retention} needs pixels, but {modality} {index} came as precomputed "
                "embeddings, which carry no encoder states; send retention 1.0 with them",
                parameter="retention",
            )
        if is_embedded or (retention == 1 and self._budgeting.most(turn, request) is None):
            return UNPRUNED
        budget = self._budgeting.budget(retention, turn, request, budget_at)
        if budget == budget_at(1.0):
            return UNPRUNED
        assert request.method is not None
        num_tokens = self._processor.num_visual_tokens(items, modality, index, kwargs)
        most = method_named(request.method).max_tokens
        if most is not None and num_tokens > most:
            raise RequestError(
                f"method {request.method!r} takes {modality} items of up to {most} tokens, for "
                f"lack of memory, and {modality} {index} has {num_tokens}; send a smaller one, or "
                f"another method such as {self._offer.default_method!r}",
                parameter="pruning.method",
            )
        return PruningSpec(
            budget=budget,
            num_tokens=num_tokens,
            query_ids=self._query_ids(self._query(request, turns, modality, index)),
            method=request.method,
            scope=request.scope,
            explanation=request.explanation,
        )

    def _query(
        self, request: PruningRequest, turns: Turns | LazyTurns, modality: str, index: int
    ) -> str:
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
        return turns.query(mode, modality, index)

    def _check_total(self, specs: Specs, inputs: Any, kwargs: Mapping[str, object]) -> None:
        """Refuse a request that keeps more than the operator allows one to keep."""
        if self._offer.settings.max_visual_tokens_per_request is None:
            return
        counts: list[tuple[int, Callable[[float], int]]] = []
        for modality, items in self._prunable(inputs):
            if isinstance(items, EmbeddingItems | DictEmbeddingItems):
                continue
            for index, spec in enumerate(specs[modality]):
                budget_at = partial(self._processor.budget, items, modality, index, kwargs)
                counts.append((spec.budget or budget_at(1.0), budget_at))
        self._budgeting.check_total(
            sum(kept for kept, _ in counts),
            lambda retention: sum(budget_at(retention) for _, budget_at in counts),
        )

    def _query_ids(self, query: str) -> tuple[int, ...]:
        if not query.strip():
            return ()
        token_ids = self._processor.info.get_tokenizer().encode(
            query.strip(), add_special_tokens=False
        )
        return tuple(sorted(set(token_ids)))


def with_contents(
    specs: Specs, items: Any, hashes: Mapping[str, Sequence[str]], salt: str
) -> Specs:
    """Give the pruned items the keys by which workers know what the encoder made of them.

    One that came as a name alone has none: a cache has it with the key of its content.
    """
    return {
        modality: [
            replace(spec, content=content_key(mm_hash, salt))
            if spec.budget and items[modality].get(index) is not None
            else spec
            for index, (spec, mm_hash) in enumerate(zip(own, hashes[modality], strict=True))
        ]
        for modality, own in specs.items()
    }


def _seeded(specs: Specs, items: Any) -> dict[str, list[PruningSpec]]:
    """Give the pruned items numbers that identify their content."""
    return {
        modality: [
            replace(spec, seed=content_number(items[modality].get(index))) if spec.budget else spec
            for index, spec in enumerate(modality_specs)
        ]
        for modality, modality_specs in specs.items()
    }


def _numbered(specs: Specs) -> dict[str, list[PruningSpec]]:
    """Tell the pruned items of a request apart: images first, then videos."""
    numbers = count()
    return {
        modality: [
            replace(spec, item=number) if spec.budget else spec
            for spec, number in zip(modality_specs, numbers, strict=False)
        ]
        for modality, modality_specs in specs.items()
    }
