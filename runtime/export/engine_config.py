"""The configuration of an engine folder, derived from the model and the export options."""

import math
from typing import Literal

from runtime.config import WEIGHTS_FILE, LLMEngineRunnerConfig
from runtime.export.kernels_export import check_limits, refuse_biases
from runtime.export.layout import expected_tensors
from runtime.export.model_config import ModelConfig
from runtime.export.options import (
    ExportOptions,
    resolve_block_size,
    resolve_capacity,
    resolve_chunk,
    resolve_dialect,
)
from runtime.export.tensorrt.options import resolve_decode_batches
from runtime.version import VERSION

_SMALL = 500_000_000
"""Parameters below which four bits are too few for the head (docs/lab/weights-and-answers.md)."""


def resolve_head(
    options: ExportOptions, model: ModelConfig
) -> Literal["body", "none", "int8", "int4"]:
    """The quantisation of the head; `auto` spares small models of int4 one of four bits."""
    if options.head_quantization != "auto":
        return options.head_quantization
    parameters = sum(math.prod(shape) for _, shape in expected_tensors(model))
    small = options.quantization == "int4" and parameters < _SMALL
    return "int8" if small and not options.on_foreign_gpu else "body"


def engine_config(model: ModelConfig, options: ExportOptions) -> LLMEngineRunnerConfig:
    """Everything that `config.json` states, but the file records.

    The longest prompt is one token shorter than the capacity, so that a prompt of exactly the
    limit still gets one token in answer. Raises `model_unsupported` for sizes that kernels do not
    serve, where they are to, and `invalid_value` for an option that the model cannot have.
    """
    capacity = resolve_capacity(options, model.max_position_embeddings, model.window)
    kernels = options.engine == "kernels"
    dialect = "native" if kernels else resolve_dialect(options)
    plan = options.plan
    inputs = [model.hidden_size]  # those of the head
    if options.quantization != "none":
        inputs += [model.query_size, model.intermediate_size]
    config = LLMEngineRunnerConfig(
        hearth_version=VERSION,
        backend=options.engine,
        device=options.device if plan is None else "cuda",
        chains_only=options.draft is not None and options.draft.verify == "chains",
        static_decode_batches=()
        if plan is None
        else resolve_decode_batches(plan, options.max_batch),
        dialect=dialect,
        architecture=model.architecture if model.images is None else model.images.name,
        dtype=options.dtype,
        kv_cache_dtype=options.dtype
        if plan is None or plan.kv_cache_dtype == "auto"
        else plan.kv_cache_dtype,
        weight_quantization=options.quantization,
        head_quantization=resolve_head(options, model),
        weight_block_size=resolve_block_size(options, inputs),
        rope_config=model.rope,
        use_context_dependent_rope=model.rope_per_row,
        use_trt_native_ops=dialect == "native",
        num_decoder_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        rotary_dim=model.rotary_dim,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        max_supported_batch_size=options.max_batch,
        max_supported_input_length=capacity - 1,
        max_kv_cache_capacity=capacity,
        prefill_chunk=resolve_chunk(options, capacity),
        vocab_size=model.vocab_size,
        output_vocab_size=model.vocab_size,
        max_supported_lora_rank=options.max_lora_rank,
        num_attention_layers=model.num_layers,
        eos_token_ids=model.eos_token_ids,
        bos_token_id=model.bos_token_id,
        num_deepstack_features=model.num_deepstack_features,
        image_token_id=model.image_token_id,
        external_weight_files=(WEIGHTS_FILE,) if kernels or options.external_weights else (),
    )
    if kernels:
        refuse_biases(model)
        check_limits(config)
    return config
