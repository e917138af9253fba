"""The bindings of a vision tower, and the sizes of its calls."""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import numpy as np

from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.errors import HearthError
from hearth.runtime.tensors.lora import RANK, lora_inputs
from hearth.runtime.tensors.profiles import Profile, StepDims, TowerDims
from hearth.runtime.tensors.tensor import numpy_dtype
from hearth.runtime.vision_config import VisionConfig

Direction = Literal["input", "output"]


class TensorSpec(NamedTuple):
    """One binding: its shape holds sizes and names of members of its engine's dims.

    `{i}` or `%d` in the name is replaced by a layer's index among the layers of its kind.
    """

    name: str
    direction: Direction
    dtype: np.dtype[Any]
    shape: tuple[int | str, ...]

    def resolve(self, dims: StepDims) -> tuple[int, ...]:
        """The shape at `dims`; raises `invalid_value` naming a member that is not positive."""
        sizes = []
        for size in self.shape:
            number = getattr(dims, size) if isinstance(size, str) else size
            if number < 1:
                raise HearthError(
                    "invalid_value",
                    f"{size} is {number} in a step that binds {self.name}: it must be positive",
                    str(size),
                )
            sizes.append(number)
        return tuple(sizes)


class TensorRegistry:
    """Registry of an engine's bindings: their names, and their shapes as functions of dims."""

    def __init__(self) -> None:
        self._specs: dict[str, TensorSpec] = {}
        self._own: dict[str, TensorSpec] = {}

    def add(self, spec: TensorSpec, layers: int | None = None) -> None:
        """Add one binding, or with `layers` one per layer; raises `internal` for a known name."""
        for one in [spec] if layers is None else _expand(spec, layers):
            if one.name in self._specs:
                raise HearthError("internal", f"binding {one.name} is registered twice", one.name)
            self._specs[one.name] = one

    def add_own(self, spec: TensorSpec) -> None:
        """Add a binding that steps bind in its tensor's own shape, as no dims decide it."""
        self._own[spec.name] = spec

    def knows(self, name: str) -> bool:
        """Return True if a binding was added, in either way."""
        return name in self._specs or name in self._own

    @property
    def own_specs(self) -> tuple[TensorSpec, ...]:
        """The bindings of `add_own`."""
        return tuple(self._own.values())

    def get(self, name: str) -> TensorSpec | None:
        """The spec of a binding whose shape follows from dims, if it is registered."""
        return self._specs.get(name)

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """All bindings whose shapes follow from dims, in the order in which they were added."""
        return tuple(self._specs.values())


def _expand(spec: TensorSpec, layers: int) -> Iterable[TensorSpec]:
    for index in range(layers):
        name = spec.name.replace("{i}", str(index)).replace("%d", str(index))
        yield spec._replace(name=name)


def index_dtype(config: LLMEngineRunnerConfig) -> np.dtype[Any]:
    """The integer type of index bindings: int64 in the native dialect, int32 in the classic."""
    return np.dtype(np.int64 if config.dialect == "native" else np.int32)


def build_registry_for_llm(config: LLMEngineRunnerConfig) -> TensorRegistry:
    """The bindings of a decoder engine, as docs/runtime.md lists them.

    Rotary tables that all rows share are not among them, as their shape follows no step. That of
    the inputs of adapters does not either (`own_specs`).
    """
    registry = TensorRegistry()
    _add_step(registry, config)
    if config.enable_eagle_spec_decode:
        data, hidden = numpy_dtype(config.dtype), config.output_hidden_dim
        registry.add(TensorSpec("hidden_states", "output", data, ("batch", "seq_len", hidden)))
    for pair in lora_inputs(config):
        for name, shape in ((pair.a, pair.shape_a), (pair.b, pair.shape_b)):
            registry.add_own(TensorSpec(name, "input", numpy_dtype(config.dtype), shape))
    if config.lora_targets and config.backend == "kernels":
        registry.add_own(TensorSpec(RANK, "input", np.dtype(np.int32), (1,)))
    return registry


def build_registry_for_spec_decode_draft(config: LLMEngineRunnerConfig) -> TensorRegistry:
    """The bindings of an EAGLE-3 draft engine."""
    registry = TensorRegistry()
    _add_step(registry, config)
    data, hidden = numpy_dtype(config.dtype), config.hidden_size
    given = TensorSpec(
        "hidden_states_input", "input", data, ("batch", "seq_len", config.base_hidden_dim)
    )
    if config.backend == "kernels":
        # Steps that grow a proposal bind none.
        registry.add_own(given)
    else:
        registry.add(given)
    for spec in (
        TensorSpec("hidden_states_from_draft", "input", data, ("batch", "seq_len", hidden)),
        TensorSpec("hidden_states", "output", data, ("batch", "select_len", hidden)),
    ):
        registry.add(spec)
    return registry


def _add_step(registry: TensorRegistry, config: LLMEngineRunnerConfig) -> None:
    data, cache, index = (
        numpy_dtype(config.dtype),
        numpy_dtype(config.kv_cache_dtype),
        index_dtype(config),
    )
    logits = ("batch", "select_len", config.output_vocab_size)
    for spec in (
        TensorSpec("inputs_embeds", "input", data, ("batch", "seq_len", config.hidden_size)),
        TensorSpec("kvcache_start_index", "input", index, ("start_index_len",)),
        TensorSpec("attention_pos_id", "input", index, ("batch", "seq_len")),
        TensorSpec("last_token_ids", "input", index, ("batch", "select_len")),
        TensorSpec("logits", "output", np.dtype(np.float32), logits),
    ):
        registry.add(spec)
    if config.takes_packed_mask:
        packed = ("batch", "seq_len", "mask_words")
        registry.add(TensorSpec("packed_mask", "input", np.dtype(np.int32), packed))
    elif config.takes_tree_mask:
        shape = ("batch", "seq_len", "attn_mask_seq_len")
        registry.add(TensorSpec("tree_mask", "input", np.dtype(np.bool_), shape))
    embeds = TensorSpec(
        "deepstack_embeds_{i}", "input", data, ("batch", "seq_len", config.hidden_size)
    )
    registry.add(embeds, config.num_deepstack_features)
    if config.use_context_dependent_rope:
        table = ("batch", config.max_kv_cache_capacity, config.rotary_dim // 2)
        for name in ("rope_cos", "rope_sin"):
            registry.add(TensorSpec(name, "input", np.dtype(np.float32), table))
    slots = ("batch", config.num_kv_heads, "kv_len", config.head_dim)
    fresh = ("batch", config.num_kv_heads, "seq_len", config.head_dim)
    present = slots if config.dialect == "native" else fresh
    for kind in ("k", "v"):
        layers = config.num_attention_layers
        registry.add(TensorSpec(f"{kind}_cache_{{i}}", "input", cache, slots), layers)
        registry.add(TensorSpec(f"present_{kind}_cache_{{i}}", "output", cache, present), layers)


_POSITIONS_PER_PATCH = {"qwen3_vl": 4, "qwen2_5_vl": 0, "idefics3": 1}
"""Entries of the table of learned positions that a patch takes, by family: 4 to interpolate."""


def build_registry_for_tower(config: VisionConfig) -> TensorRegistry:
    """The bindings of a vision tower, as docs/vision.md lists them."""
    registry = TensorRegistry()
    index = np.dtype(np.int64 if config.dialect == "native" else np.int32)
    real, data = np.dtype(np.float32), numpy_dtype(config.embedding_dtype)

    def add(
        name: str, dtype: np.dtype[np.generic], *shape: int | str, direction: Direction = "input"
    ) -> None:
        registry.add(TensorSpec(name, direction, dtype, shape))

    add("patches", np.dtype(np.uint8), "patches", config.patch_bytes)
    add("segment_ids", index, "patches")
    if config.window_size:
        add("window_ids", index, "patches")
    if config.family != "idefics3":
        add("rotary_cos", real, "patches", config.head_dim // 2)
        add("rotary_sin", real, "patches", config.head_dim // 2)
    positions = _POSITIONS_PER_PATCH[config.family]
    if positions:
        add("position_ids", index, positions, "patches")
    if positions > 1:
        add("position_weights", real, positions, "patches")
    for name in tower_outputs(config):
        add(name, data, "tokens", config.output_size, direction="output")
    return registry


def tower_outputs(config: VisionConfig) -> list[str]:
    """The outputs of a tower: merged embeddings, then what goes into the first layers of text."""
    return ["embeddings", *(f"deepstack_{k}" for k in range(config.num_deepstack_features))]


def tower_dims(config: VisionConfig, patches: int) -> TowerDims:
    """The sizes of a call of so many patches."""
    return TowerDims(patches, patches // config.merge_size**2)


def build_tower_profiles(config: VisionConfig) -> tuple[Profile]:
    """The one profile of a tower: one token to `max_patches`."""
    merged = config.merge_size**2
    most = config.max_patches // merged
    sizes = (TowerDims(tokens * merged, tokens) for tokens in (1, max(1, most // 4), most))
    return (Profile(*sizes),)
