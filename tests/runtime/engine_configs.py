"""A configuration for tests that need one but no engine."""

from msgspec import structs

from hearth.runtime.config import DRAFT_ARCHITECTURE, LLMEngineRunnerConfig, PlanRecord, RopeConfig

PLAN = PlanRecord(
    tensorrt_version="8.6.1",
    builder="tensorrt",
    version_compatible=True,
    gpu_name="",
    compute_capability="",
    graph_sha256="",
)
"""A plan that any GPU and later versions run."""


def small_config() -> LLMEngineRunnerConfig:
    """Two layers of two attention heads over one K/V head, native, float32."""
    return LLMEngineRunnerConfig(
        hearth_version="0.1.0",
        backend="onnxruntime",
        dialect="native",
        architecture="llama",
        dtype="float32",
        kv_cache_dtype="float32",
        rope_config=RopeConfig(),
        num_decoder_layers=2,
        num_attention_layers=2,
        num_attention_heads=2,
        num_kv_heads=1,
        head_dim=8,
        rotary_dim=8,
        hidden_size=16,
        intermediate_size=32,
        max_supported_batch_size=4,
        max_supported_input_length=63,
        max_kv_cache_capacity=64,
        prefill_chunk=16,
        vocab_size=100,
        output_vocab_size=100,
        eos_token_ids=(2,),
    )


def draft_config(base: LLMEngineRunnerConfig) -> LLMEngineRunnerConfig:
    """A draft of one layer for `base`, with 40 tokens of its own."""
    return structs.replace(
        base,
        architecture=DRAFT_ARCHITECTURE,
        num_decoder_layers=1,
        num_attention_layers=1,
        output_vocab_size=40,
        base_hidden_dim=3 * base.hidden_size,
        max_draft_tree_size=60,
    )
