"""The API process's half: from a request's wishes to budgets, fields, hashes and placeholders.

Everything the scheduler must know is decided here, before the encoder has run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeVar

from transformers import BatchFeature
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.processing import BaseMultiModalProcessor, PromptUpdate

from msdg_vllm.core import num_kept_tokens
from msdg_vllm.core.errors import RequestError
from msdg_vllm.core.profiles import EncoderProfile
from msdg_vllm.engine.api.budgets import Chooser, shortened
from msdg_vllm.engine.api.pixels import PIXELS, content_key, shares_pixels, with_spec
from msdg_vllm.engine.api.queries import LazyTurns, TurnMarkers
from msdg_vllm.engine.api.specs import Scaled, Specifier, Specs
from msdg_vllm.engine.encoder import Offer
from msdg_vllm.engine.spec import UNPRUNED, PruningSpec, field_name
from msdg_vllm.methods import Encoder
from msdg_vllm.request import PruningRequest, Turns, check_processor_kwargs

SPECS = "msdg_specs"
"""Key under which a processed prompt carries the specs of its items, by modality."""

FITTING = "msdg_fitting_retention"
"""Key under which a prompt that is too long says at which retention it would not be; 0: at none."""

RESERVATION = "msdg_reservation"
"""Key under which it carries what stands for it while it waits, if someone decided about it."""

SALT = "msdg_cache_salt"
"""Key under which the `cache_salt` of a prompt comes to the processor."""

_HASHES = "msdg_hashes"  # hashes by content, where vLLM's own are the same
_PROFILING = "msdg_profiling"
_DUMMY = object()

_Model = TypeVar("_Model", bound=type)


class PruningProcessor(BaseMultiModalProcessor[Any]):
    """Mixin for a vLLM processor: goes before the stock class in the bases.

    A request without pruning leaves with the prompt, the hashes and the fields of the stock
    processor, plus one field per item that says so.
    """

    modalities: tuple[str, ...] = ("image",)
    """Modalities that can be pruned."""

    carrying_text: tuple[str, ...] = ()
    """Modalities whose items have text between their tokens. How many tokens stay before and
    behind each text is known only after selection, so the model embeds the text with them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.chooser: Chooser | None = None
        self._turn_markers: dict[str, TurnMarkers] = {}

    @cached_property
    def offer(self) -> Offer:
        """What the server offers on this model.

        Not found out before it is asked for: vLLM makes a processor for every chat with an image,
        only to ask it how many a prompt may have.
        """
        return Offer.of(self.info.ctx.model_config, self.encoder_of)

    @cached_property
    def _specifier(self) -> Specifier:
        return Specifier(self)

    @staticmethod
    def encoder_of(hf_config: Any, profile: EncoderProfile | None) -> Encoder:
        """What methods may know of a checkpoint's encoder, from its configuration alone."""
        raise NotImplementedError

    def num_visual_tokens(
        self, items: Any, modality: str, index: int, kwargs: Mapping[str, object]
    ) -> int:
        """Tokens that the encoder gives for an item, from its geometry and processor kwargs."""
        raise NotImplementedError

    def budget(
        self, items: Any, modality: str, index: int, kwargs: Mapping[str, object], retention: float
    ) -> int:
        """Tokens to keep of an item; at retention 1, all that pruning could ever keep of it."""
        return num_kept_tokens(self.num_visual_tokens(items, modality, index, kwargs), retention)

    def scaled(self, items: Any, specs: Specs, kwargs: dict[str, object]) -> Scaled:
        """Scale down the items whose method wants it; an encoder of one size has none such."""
        return items, specs, dict(kwargs)

    def placeholder_ids(self) -> Mapping[int, str]:
        """Modality of each placeholder token id."""
        raise NotImplementedError

    def apply(self, inputs: Any, timing_ctx: Any) -> Any:
        kwargs = dict(inputs.hf_processor_mm_kwargs)
        # A request that sends the name cannot send the value, so it gets nothing by it.
        profiling = kwargs.pop(_PROFILING, None) is _DUMMY
        salt = str(kwargs.pop(SALT, ""))
        request = PruningRequest.take_from(kwargs)
        check_processor_kwargs(kwargs)
        method = request.method or self.offer.default_method
        if request.method is not None:
            self.offer.check_method(method)
        request = replace(request, method=method)
        # A prompt is read only when a query is wanted of it: most are not pruned.
        turns = request.turns or LazyTurns(partial(self._turns_of_prompt, inputs.prompt))
        if profiling:
            specs, reservation = self._specifier.profiling(inputs, kwargs), None
        else:
            specs, reservation = self._specifier.specs(request, turns, inputs, kwargs)
        items, specs, kwargs = self.scaled(inputs.mm_data_items, specs, kwargs)
        seen = replace(inputs, mm_data_items=items)
        if not profiling:
            specs = self._with_contents(specs, seen, kwargs, salt)
        kwargs |= {SPECS: specs, SALT: salt}
        processed: Any = super().apply(replace(seen, hf_processor_mm_kwargs=kwargs), timing_ctx)
        processed[SPECS] = specs
        stock, _ = _split(kwargs)
        if any(spec.budget for own in specs.values() for spec in own):
            self.check_prompt(processed, items, stock)
        if len(processed["prompt_token_ids"]) > self.info.ctx.model_config.max_model_len:
            processed[FITTING] = self._specifier.fitting_retention(processed, inputs, stock)
        if reservation is not None:
            processed[RESERVATION] = reservation
        self._finish_items(processed, specs, seen)
        return processed

    def _finish_items(self, processed: Any, specs: Specs, inputs: Any) -> None:
        """Give pruned items their own specs and hashes, whatever a cache had of their pixels."""
        processed["mm_hashes"] = {name: [*own] for name, own in processed["mm_hashes"].items()}
        pixels: dict[str, str] = {}
        for modality, own in specs.items():
            items, hashes = [*processed["mm_kwargs"][modality]], processed["mm_hashes"][modality]
            for index, spec in enumerate(own):
                self._check_pixels(items[index])
                if spec.budget:
                    shared = shares_pixels(inputs, modality, index)
                    # An item in shared memory crosses as its address, but the scheduler must know
                    # what it costs; see engine/scheduling.py.
                    items[index] = with_spec(items[index], modality, spec, shared=shared)
                    if shared:
                        identity = self._identity(hashes[index], spec)
                        pixels[identity], hashes[index] = hashes[index], identity
            processed["mm_kwargs"][modality] = items
        processed[PIXELS] = pixels

    def _identity(self, pixels: str, spec: PruningSpec) -> str:
        """The hash of what is kept of an item, given that of its pixels."""
        algorithm = self.info.ctx.get_mm_config().mm_hasher_algorithm
        return MultiModalHasher.hash_kwargs(algorithm, pixels=pixels, pruning=spec.identity())

    def _check_pixels(self, item: Mapping[str, Any] | None) -> None:
        """Raise `RequestError` for pixels that a tower of one resolution cannot take.

        Only trusted `mm_processor_kwargs` make such; they would end the engine.
        """
        side = getattr(self.info.get_hf_config().vision_config, "image_size", None)
        if isinstance(side, list | tuple):  # InternVL says height and width
            side = side[0]
        pixels = (item or {}).get("pixel_values")
        shape = () if pixels is None else tuple(pixels.data.shape)
        if side and len(shape) > 2 and shape[-2:] != (side, side):
            raise RequestError(
                f"mm_processor_kwargs make an image of {shape[-1]} x {shape[-2]} pixels, but the "
                f"vision encoder takes {side} x {side}; leave out what changes the size",
                parameter="mm_processor_kwargs",
            )

    def check_prompt(self, processed: Any, items: Any, kwargs: Mapping[str, object]) -> None:
        """Raise `RequestError` for a prompt with pruned items that the model cannot read."""

    def get_dummy_inputs(self, *args: Any, **kwargs: Any) -> Any:
        # Memory is profiled on these: they keep every token, but by the way of a pruned image.
        inputs = super().get_dummy_inputs(*args, **kwargs)
        return replace(
            inputs, hf_processor_mm_kwargs={**inputs.hf_processor_mm_kwargs, _PROFILING: _DUMMY}
        )

    def turn_markers(self, chat_template: str | None = None) -> TurnMarkers:
        """What a chat template, by default the model's own, puts around what users write."""
        tokenizer = self.info.get_tokenizer()
        template = (
            chat_template
            or getattr(tokenizer, "chat_template", None)
            or getattr(self.info.get_hf_processor(), "chat_template", None)
        )
        if not isinstance(template, str):
            return TurnMarkers()
        if template not in self._turn_markers:
            self._turn_markers[template] = TurnMarkers.of_template(
                tokenizer, template, self.placeholder_ids()
            )
        return self._turn_markers[template]

    def _turns_of_prompt(self, prompt: Sequence[int]) -> Turns:
        return self.turn_markers().turns_of_prompt(
            prompt, self.info.get_tokenizer(), self.placeholder_ids()
        )

    def _with_contents(
        self, specs: Specs, inputs: Any, kwargs: dict[str, object], salt: str
    ) -> Specs:
        """Give the pruned items the keys by which workers know what the encoder made of them.

        By content, also where a client or vLLM itself names items otherwise. One that came as a
        name alone has none: a cache has it with the key of its content.
        """
        if not any(spec.budget for own in specs.values() for spec in own):
            return specs
        hashes = super()._get_mm_hashes(
            replace(inputs, hf_processor_mm_kwargs=kwargs, mm_uuid_items=None)
        )
        if not any(uuid for own in (inputs.mm_uuid_items or {}).values() for uuid in own or ()):
            kwargs[_HASHES] = hashes
        items = inputs.mm_data_items
        return {
            modality: [
                replace(spec, content=content_key(mm_hash, salt))
                if spec.budget and items[modality].get(index) is not None
                else spec
                for index, (spec, mm_hash) in enumerate(zip(own, hashes[modality], strict=True))
            ]
            for modality, own in specs.items()
        }

    def _get_mm_hashes(self, inputs: Any) -> Any:
        stock, specs = _split(inputs.hf_processor_mm_kwargs)
        known: Any = inputs.hf_processor_mm_kwargs.get(_HASHES)
        found = known or super()._get_mm_hashes(replace(inputs, hf_processor_mm_kwargs=stock))
        hashes = {modality: list(own) for modality, own in found.items()}
        salt = {"salt": inputs.hf_processor_mm_kwargs.get(SALT) or ""}
        algorithm = self.info.ctx.get_mm_config().mm_hasher_algorithm
        for modality, own in specs.items():
            for index, spec in enumerate(own):
                if spec != UNPRUNED:
                    content = hashes[modality][index]
                    # Not that of an unpruned item: what a cache has of it goes without a spec.
                    pixels = MultiModalHasher.hash_kwargs(algorithm, content=content, **salt)
                    hashes[modality][index] = (
                        pixels
                        if shares_pixels(inputs, modality, index)
                        else self._identity(pixels, spec)
                    )
        return hashes

    def _get_cache_missing_processor_kwargs(self, inputs: Any, mm_is_cached: Any) -> Any:
        stock, specs = _split(super()._get_cache_missing_processor_kwargs(inputs, mm_is_cached))
        missing = {
            modality: [
                spec
                for spec, is_cached in zip(modality_specs, mm_is_cached[modality], strict=True)
                if not is_cached
            ]
            for modality, modality_specs in specs.items()
        }
        return {**stock, SPECS: missing}

    def _apply_hf_processor_main(
        self, mm_items: Any, hf_kwargs: Mapping[str, object]
    ) -> BatchFeature:
        # The HF processor is cached by its kwargs: a query among them would rebuild it each time.
        stock, specs = _split(hf_kwargs)
        processed = super()._apply_hf_processor_main(mm_items, stock)
        self.check_geometry(processed, specs)
        for modality, modality_specs in specs.items():
            if modality_specs:
                processed[field_name(modality)] = [spec.to_tensor() for spec in modality_specs]
        return processed

    def check_geometry(self, processed: BatchFeature, specs: Specs) -> None:
        """Raise `RequestError` when the HF processor made other items than their sizes said."""

    def _get_mm_fields_config(
        self, hf_inputs: Any, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        stock, specs = _split(hf_processor_mm_kwargs)
        return {
            **super()._get_mm_fields_config(hf_inputs, stock),
            **{
                field_name(modality): MultiModalFieldConfig.batched(modality, keep_on_cpu=True)
                for modality in specs
            },
        }

    def _cached_apply_hf_processor(self, inputs: Any, timing_ctx: Any) -> Any:
        # Caches hold the placeholders of whole items: they serve every budget.
        result = super()._cached_apply_hf_processor(inputs, timing_ctx)
        _, specs = _split(inputs.hf_processor_mm_kwargs)
        updates = dict(result.prompt_updates)
        for modality, own in specs.items():
            carries_text = modality in self.carrying_text
            updates[modality] = [
                [
                    replace(
                        update,
                        content=shortened(update.content, spec.budget, carries_text=carries_text),
                    )
                    for update in of_item
                ]
                for of_item, spec in zip(updates[modality], own, strict=True)
            ]
        return result._replace(prompt_updates=updates)

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Mapping[str, object], out_mm_kwargs: Any
    ) -> Sequence[PromptUpdate]:
        stock, _ = _split(hf_processor_mm_kwargs)
        updates: Sequence[PromptUpdate] = super()._get_prompt_updates(
            mm_items, stock, out_mm_kwargs
        )
        return updates


def with_processor(processor: Callable[..., Any]) -> Callable[[_Model], _Model]:
    """Decorate a model that differs from the stock one in its processor alone."""

    def register(model_class: _Model) -> _Model:
        stock: Any = model_class._processor_factory  # type: ignore[attr-defined]
        model_class._processor_factory = replace(stock, processor=processor)  # type: ignore[attr-defined]
        return model_class

    return register


def _split(kwargs: Mapping[str, object]) -> tuple[dict[str, object], Specs]:
    """Part stock processor kwargs from the specs that travel among them."""
    stock = dict(kwargs)
    specs: Any = stock.pop(SPECS, {})
    for name in (SALT, _HASHES):
        stock.pop(name, None)
    return stock, specs
