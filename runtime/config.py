"""The configuration of an engine folder (`config.json`): every field, read strictly."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Literal

import msgspec

from hearth.runtime.errors import HearthError

DType = Literal["float32", "float16", "bfloat16"]
Quantization = Literal["none", "int8", "int4"]
DeviceKind = Literal["cpu", "cuda"]
RopeType = Literal["default", "llama3", "linear", "mrope", "none"]
CONFIG_FILE = "config.json"
BASE_CONFIG_FILE = "base_config.json"
"""The configuration of an engine that a draft engine accompanies."""
DRAFT_CONFIG_FILE = "draft_config.json"
CONFIG_FILES = (CONFIG_FILE, BASE_CONFIG_FILE, DRAFT_CONFIG_FILE)
"""A folder holds one of them."""
DRAFT_ARCHITECTURE = "eagle3"
LORA_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
"""The projections of a layer that an adapter adds to."""
LORA_JOINED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
"""Projections that may share one pair of inputs: [K, r] side by side, [r, N] on the diagonal."""
MOST_TREE_NODES = 128
_AXES = 3
ENGINE_FORMAT = 2
"""Format that is written; the one before is read too (`LLMEngineRunnerConfig.outdated`)."""
READ_FORMATS = (1, ENGINE_FORMAT)


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rotary embedding: base frequency, scaling kind and that kind's parameters.

    Of type `mrope` positions are in time, height and width: `mrope_section` counts the rotated
    pairs that go by each, which lie one behind the other, or take turns if `mrope_interleaved`.
    """

    type: RopeType = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    mrope_section: tuple[int, ...] = ()
    mrope_interleaved: bool = False


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size in bytes and digest of one file of the engine folder (`hearth.runtime.files`)."""

    bytes: int
    sha256: str


class PlanRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Builder and target of a TensorRT plan, compared when it is loaded.

    `version_compatible` plans also run on later TensorRT versions, up to those that still read
    this one. `graph_sha256` is the digest of the ONNX graph that was built. `scratch_bytes` is the
    context memory that all of its steps share, None where the plan was not opened.
    """

    tensorrt_version: str
    builder: Literal["tensorrt", "tensorrt_rtx"]
    version_compatible: bool
    gpu_name: str
    compute_capability: str
    graph_sha256: str
    scratch_bytes: int | None = None


class Drift(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Distance of quantised weights' logits from the model's, at each of some `positions`.

    At `same` of them the likeliest token is the model's; `mean` and `largest` are of the divergence
    (Kullback and Leibler) of all tokens' shares from the model's, in nats.
    """

    positions: int
    same: int
    mean: float
    largest: float


class LLMEngineRunnerConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=False
):
    """All that the runtime knows of an engine; lengths in tokens, sizes in elements.

    `model_name` is what the folder was called that the engine was exported from, or what the export
    was told; this is `served_name` too, which is empty where the engine folder's name is served.
    `max_kv_cache_capacity` counts cache slots per row; a row may hold that many tokens, prompt
    and generation together. `prefill_chunk` is the longest piece of a prompt in one step.
    `template_tokens` are the special tokens that a chat template has by name, as `bos_token`.
    `device` is the one that the engine was made for. `backend` "kernels" are Hearth's own, without
    a graph. `operators` are "standard"; "contrib" of older folders is refused.
    `static_decode_batches` are the batch sizes of a TensorRT plan's decode profiles, profile 1 on;
    empty where one profile serves every size.

    `max_verify_tree_size` is the largest token tree of a step, 0 for none. A base engine with
    `enable_eagle_spec_decode` gives `output_hidden_dim` numbers a token: the inputs of the layers
    `eagle_layers`. It and its draft take a tree mask, unless they are causal: `chains_only`. A
    draft engine (architecture "eagle3") takes `base_hidden_dim` such numbers and trees of up to
    `max_draft_tree_size` slots, and its `output_vocab_size` may be smaller than `vocab_size`.
    `static_drafting` are the tokens after a node and the levels of a plan's proposals; empty where
    any serve.

    `external_weight_files` names the file of an engine whose graph has no weights, and which so
    serves every model of its shape; an engine of kernels has it always, a draft's too.

    A model that takes images has an `image_token_id`, which their embeddings replace, and
    adds `num_deepstack_features` of each behind as many first layers. With
    `use_context_dependent_rope` every row has rotary tables of its own, indexed by slot.

    `weight_quantization` is that of matrix products; the head, which gives the logits, may have
    one of its own. `weight_block_size` counts inputs that share a scale, in both. The embedding
    table of such an engine is stored as `embedding_dtype`, None for the type of its source, or that
    of the graph where a head reads it. `drift` is what the export measured.

    An engine with `max_supported_lora_rank` takes adapters up to that rank, by a pair of inputs
    for each of `lora_targets` in each layer (`hearth.runtime.tensors.lora`): the projections of
    `LORA_TARGETS`, or what joins some of them.
    """

    engine_format: int = ENGINE_FORMAT
    hearth_version: str
    model_name: str = ""
    served_name: str = ""
    backend: Literal["kernels", "onnxruntime", "tensorrt", "simulated"]
    device: DeviceKind = "cpu"
    dialect: Literal["native", "classic"]
    operators: Literal["standard", "contrib"] = "standard"
    static_decode_batches: tuple[int, ...] = ()
    plan: PlanRecord | None = None
    architecture: str
    dtype: DType
    kv_cache_dtype: DType
    weight_quantization: Quantization = "none"
    head_quantization: Literal["body", "none", "int8", "int4"] = "body"
    weight_block_size: int = 0
    embedding_dtype: DType | None = None
    drift: Drift | None = None

    rope_config: RopeConfig
    use_context_dependent_rope: bool = False
    enable_eagle_spec_decode: bool = False
    use_trt_native_ops: bool = True
    num_decoder_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    hidden_size: int
    intermediate_size: int
    max_supported_batch_size: int
    max_supported_input_length: int
    max_kv_cache_capacity: int
    prefill_chunk: int
    vocab_size: int
    reduced_vocab_size: int = 0
    output_vocab_size: int
    max_supported_lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    output_hidden_dim: int = 0
    max_verify_tree_size: int = 0
    eagle_layers: tuple[int, ...] = ()
    base_hidden_dim: int = 0
    max_draft_tree_size: int = 0
    chains_only: bool = False
    static_drafting: tuple[int, ...] = ()
    num_deepstack_features: int = 0
    audio_token_id: int = 0
    image_token_id: int = 0
    num_mamba_layers: int = 0
    num_attention_layers: int
    mamba_num_heads: int = 0
    mamba_head_dim: int = 0
    ssm_state_size: int = 0
    conv_dim: int = 0
    conv_kernel: int = 0

    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    template_tokens: dict[str, str] = {}
    step_ms: float = 0.0
    prefill_us: float = 0.0
    external_weight_files: tuple[str, ...] = ()
    files: dict[str, FileRecord] = {}

    @property
    def outdated(self) -> str:
        """Faults of the engine due to the Hearth version that exported it; "" for none.

        Format 1 has no `template_tokens`: its templates see those that the model's config.json
        names. Its export took a tied head for the table, whatever was stored, and rotated parts of
        heads.
        """
        if self.engine_format == ENGINE_FORMAT or self.backend == "simulated":
            return ""
        return (
            "an older Hearth exported this engine: chat templates may see other special tokens "
            "than the tokenizer's, and a head stored beside a tied table was left out: run hearth "
            f"export again on {self.model_name or 'the model'}"
        )

    @property
    def head_weights(self) -> Quantization:
        """Quantisation of the product that gives the logits."""
        own = self.head_quantization
        return self.weight_quantization if own == "body" else own

    @property
    def takes_tree_mask(self) -> bool:
        """True if a step has a mask of token trees."""
        speculates = self.enable_eagle_spec_decode or self.base_hidden_dim > 0
        return speculates and not self.chains_only

    @property
    def takes_packed_mask(self) -> bool:
        """True if that mask is in bits, 32 tokens a word: `packed_mask` instead of `tree_mask`."""
        return self.takes_tree_mask and self.backend == "kernels"


def parse_config(data: bytes, source: str = CONFIG_FILE) -> LLMEngineRunnerConfig:
    """Read a `config.json`; raises `engine_corrupt` or `engine_incompatible` naming the field."""
    try:
        config = msgspec.json.decode(data, type=LLMEngineRunnerConfig)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HearthError("engine_corrupt", f"{source} cannot be read: {error}", source) from error
    check_format(config.engine_format, source)
    _check_sizes(config)
    _check_served(config)
    return config


def check_format(engine_format: int, source: str) -> None:
    """Raise `engine_incompatible` for a format of `source` that is not read."""
    if engine_format not in READ_FORMATS:
        raise HearthError(
            "engine_incompatible",
            f"{source} has engine format {engine_format}, this Hearth reads up to "
            f"{ENGINE_FORMAT}: export the model again",
            "engine_format",
        )


def config_file(config: LLMEngineRunnerConfig) -> str:
    """The name of the file that this configuration belongs into."""
    if config.architecture == DRAFT_ARCHITECTURE:
        return DRAFT_CONFIG_FILE
    return BASE_CONFIG_FILE if config.enable_eagle_spec_decode else CONFIG_FILE


def _is_of_a_model(data: bytes) -> bool:
    """Tell whether this is the configuration of a Hugging Face folder."""
    try:
        fields = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    known = isinstance(fields, dict) and "engine_format" not in fields
    return known and not fields.keys().isdisjoint({"model_type", "architectures"})


def load_config(folder: Path) -> LLMEngineRunnerConfig:
    """Read the configuration of an engine folder; raises `engine_missing` when there is none."""
    try:
        for path in (folder / name for name in CONFIG_FILES):
            if path.exists():
                data = path.read_bytes()
                if _is_of_a_model(data):
                    what = f"{folder} is a model: hearth export makes an engine folder of it"
                    raise HearthError("engine_missing", what, "engine")
                return parse_config(data, str(path))
        what = f"there is no {folder}"
        if folder.exists():
            what = f"{folder} is not an engine folder: hearth export makes one of a model's folder"
    except OSError as error:
        what = f"{error.filename or folder} cannot be read ({error.strerror})"
    raise HearthError("engine_missing", what, "engine")


WEIGHTS_FILE = "weights.safetensors"
"""External weights: all of a base engine's, its embedding table too."""
_HEAD_MULTIPLE, _LARGEST_HEAD = 16, 256
_SIZE_MULTIPLE = 8
_MOST_SHARING = 16
"""Elements of a head, sizes, and heads that share keys: what the tiles of kernels are made for."""
_POSITIVE = [
    field.name
    for field in msgspec.structs.fields(LLMEngineRunnerConfig)
    if field.type is int and field.required
]
# Fields that other kinds of engine use; an engine that needs them is refused, never half served.
_NOT_SERVED = (
    "reduced_vocab_size audio_token_id num_mamba_layers mamba_num_heads mamba_head_dim "
    "ssm_state_size conv_dim conv_kernel"
)


def _check_sizes(config: LLMEngineRunnerConfig) -> None:
    faults = [_size_faults, _image_faults, _base_faults, _draft_faults, _adapter_faults]
    if config.backend == "kernels":
        faults += [_kernel_faults, kernel_limits]
    for wrong, name, what in chain.from_iterable(find(config) for find in faults):
        if wrong:
            raise HearthError("engine_corrupt", f"{name} {what}", name)


def _size_faults(config: LLMEngineRunnerConfig) -> Iterator[tuple[bool, str, str]]:
    """Yield for each field True if it is wrong, its name, and what it must be."""
    for name in _POSITIVE:
        yield getattr(config, name) < 1, name, "must be at least 1"
    shares = config.num_attention_heads % config.num_kv_heads == 0
    yield not shares, "num_kv_heads", "must divide num_attention_heads"
    wrong = config.rotary_dim > config.head_dim or config.rotary_dim % 2 > 0
    yield wrong, "rotary_dim", "must be even, and at most head_dim"
    wrong = config.use_trt_native_ops != (config.dialect == "native")
    yield wrong, "use_trt_native_ops", "must be those of the native dialect"
    wrong = config.max_supported_input_length > config.max_kv_cache_capacity
    yield wrong, "max_supported_input_length", "must not exceed the capacity"
    kinds = config.num_attention_layers + config.num_mamba_layers
    yield kinds != config.num_decoder_layers, "num_attention_layers", "must be all that are left"
    blocks = config.weight_block_size
    kinds_of_weights = {config.weight_quantization, config.head_weights}
    wrong = blocks < 0 or (blocks > 0) != (kinds_of_weights != {"none"})
    yield wrong, "weight_block_size", "must come with quantised weights"
    sizes, ends = config.static_decode_batches, config.eos_token_ids
    wrong = sizes != tuple(sorted({*sizes})) or min(sizes, default=1) < 1
    yield wrong, "static_decode_batches", "must ascend from 1 on"
    runs_on = {"kernels": "cuda", "tensorrt": "cuda", "simulated": "cpu"}.get(
        config.backend, config.device
    )
    yield config.device != runs_on, "device", f"must be {runs_on}"
    wrong = not ends or not all(0 <= end < config.vocab_size for end in ends)
    yield wrong, "eos_token_ids", "must be tokens, one at least"
    wrong = config.external_weight_files not in ((), (WEIGHTS_FILE,))
    of_a_graph = config.backend != "kernels" and config.architecture == DRAFT_ARCHITECTURE
    wrong |= bool(config.external_weight_files) and of_a_graph
    yield wrong, "external_weight_files", f"must be {WEIGHTS_FILE}, of a base engine"


def _image_faults(config: LLMEngineRunnerConfig) -> Iterator[tuple[bool, str, str]]:
    rope, features = config.rope_config, config.num_deepstack_features
    sections, pairs = rope.mrope_section, config.rotary_dim // 2
    fits = len(sections) == _AXES and min(sections) > 0 and sum(sections) == pairs
    wrong = fits != (rope.type == "mrope") or bool(sections) != fits
    yield wrong, "rope_config", f"must have an mrope_section of {pairs} pairs with type mrope"
    wrong = config.use_context_dependent_rope != (rope.type == "mrope")
    yield wrong, "use_context_dependent_rope", "must come with rope type mrope"
    wrong = not 0 <= config.image_token_id < config.vocab_size
    yield wrong, "image_token_id", "must be a token"
    taking = (
        config.num_decoder_layers if config.image_token_id and not config.base_hidden_dim else 0
    )
    wrong = not 0 <= features <= taking
    yield wrong, "num_deepstack_features", "must be those of layers of a model that takes images"


def _base_faults(config: LLMEngineRunnerConfig) -> Iterator[tuple[bool, str, str]]:
    taps, layers = config.eagle_layers, config.num_decoder_layers
    speculates = config.enable_eagle_spec_decode
    least = 1 if speculates else 0
    most = min(MOST_TREE_NODES, config.max_kv_cache_capacity)
    within = len(set(taps)) == len(taps) and all(0 <= tap <= layers for tap in taps)
    yield speculates != bool(taps), "eagle_layers", "must come with EAGLE"
    yield not within, "eagle_layers", f"must be distinct and from 0 to {layers}"
    wrong = config.output_hidden_dim != len(taps) * config.hidden_size
    yield wrong, "output_hidden_dim", "must be hidden_size for each of eagle_layers"
    wrong = not least <= config.max_verify_tree_size <= most
    yield wrong, "max_verify_tree_size", f"must be {least} to {most}"
    wrong = config.chains_only and not (speculates or config.base_hidden_dim)
    yield wrong, "chains_only", "must come with EAGLE"


def _draft_faults(config: LLMEngineRunnerConfig) -> Iterator[tuple[bool, str, str]]:
    is_draft = config.architecture == DRAFT_ARCHITECTURE
    tree, slots = config.max_draft_tree_size, config.max_kv_cache_capacity
    yield is_draft != (config.base_hidden_dim > 0), "base_hidden_dim", "must be that of a draft"
    wrong = is_draft != (tree > 0) or tree > slots
    yield wrong, "max_draft_tree_size", "must be that of a draft, and at most its capacity"
    static = is_draft and bool(config.static_decode_batches)
    wrong = _shape_of_drafting(config) != (tree if static else None)
    yield wrong, "static_drafting", "must be tokens and levels of the largest tree of a plan"
    wrong = is_draft and config.num_decoder_layers != 1
    yield wrong, "num_decoder_layers", "must be 1 in a draft"
    own, full = config.output_vocab_size, config.vocab_size
    wrong = own > full or (own < full and not is_draft)
    yield wrong, "output_vocab_size", "must be vocab_size, or less in a draft"


def _adapter_faults(config: LLMEngineRunnerConfig) -> Iterator[tuple[bool, str, str]]:
    rank, targets = config.max_supported_lora_rank, config.lora_targets
    wrong = rank < 0 or (rank > 0 and config.architecture == DRAFT_ARCHITECTURE)
    yield wrong, "max_supported_lora_rank", "must be 0 or more, and 0 in a draft"
    parts = tuple(chain.from_iterable(LORA_JOINED.get(one, (one,)) for one in targets))
    wrong = parts != tuple(one for one in LORA_TARGETS if one in parts) or bool(parts) != (rank > 0)
    yield wrong, "lora_targets", "must be projections in order, and come with a rank"


def _kernel_faults(config: LLMEngineRunnerConfig) -> Iterator[tuple[bool, str, str]]:
    """Yield, as `_size_faults`, the fields of an engine of kernels."""
    yield config.dialect != "native", "dialect", "must be native with kernels"
    yield config.kv_cache_dtype != config.dtype, "kv_cache_dtype", "must be dtype with kernels"
    yield config.chains_only, "chains_only", "must not be with kernels, which take trees"
    yield bool(config.static_decode_batches), "static_decode_batches", "must be empty with kernels"
    yield config.plan is not None, "plan", "must not come with kernels"
    wrong = not config.external_weight_files
    yield wrong, "external_weight_files", f"must be {WEIGHTS_FILE} with kernels"


def kernel_limits(config: LLMEngineRunnerConfig) -> Iterator[tuple[bool, str, str]]:
    """Yield for each size or type True if kernels refuse it, its name, and what it must be."""
    yield config.dtype == "float32", "dtype", "must be float16 or bfloat16"
    wrong = config.head_dim % _HEAD_MULTIPLE > 0 or config.head_dim > _LARGEST_HEAD
    yield wrong, "head_dim", f"must be a multiple of {_HEAD_MULTIPLE}, up to {_LARGEST_HEAD}"
    for name in ("hidden_size", "intermediate_size"):
        wrong = getattr(config, name) % _SIZE_MULTIPLE > 0
        yield wrong, name, f"must be a multiple of {_SIZE_MULTIPLE}"
    wrong = config.num_attention_heads > _MOST_SHARING * config.num_kv_heads
    yield wrong, "num_attention_heads", f"must be at most {_MOST_SHARING} for each of num_kv_heads"


def _shape_of_drafting(config: LLMEngineRunnerConfig) -> int | None:
    """Slots of a plan's proposals, None where any serve."""
    match config.static_drafting:
        case ():
            return None
        case (top_k, step) if top_k > 0 and step > 0:
            return top_k * step
    return 0


def _check_served(config: LLMEngineRunnerConfig) -> None:
    if config.operators == "contrib":
        raise HearthError(
            "engine_incompatible",
            "engines of ONNX Runtime's own CUDA operators are not served any more: run hearth "
            f"export {config.model_name or 'MODEL_DIR'} ENGINE_DIR --device cuda, which makes one "
            "of Hearth's own kernels, and on a GPU before Ampere add --backend onnxruntime",
            "operators",
        )
    for name in _NOT_SERVED.split():
        if getattr(config, name):
            raise HearthError("engine_incompatible", f"{name} is not served yet", name)
