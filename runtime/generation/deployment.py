from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from msgspec import structs

from hearth.runtime.config import LLMEngineRunnerConfig, load_config
from hearth.runtime.device.device import MOST_GPU_ROWS
from hearth.runtime.engine_folder import DRAFT_FOLDER, verify_folder
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.simulated_engine import as_simulated
from hearth.runtime.kv_cache.page_pool import prefix_capacity
from hearth.runtime.kv_cache.pages import TierCapacity
from hearth.runtime.loading import ProgressCallback, no_progress
from hearth.runtime.lora.stored import adapter_folders, tensor_bytes
from hearth.runtime.options import (
    EagleDraftingConfig,
    RuntimeOptions,
    SpeculationOptions,
    check_speculation,
)
from hearth.runtime.runner.engine_tables import EngineTables, read_shapes
from hearth.runtime.vision_config import VISION_FOLDER, VisionConfig, load_vision_config
from hearth.runtime.weights.external_weight_manager import ExternalWeightManager


def effective_config(
    stored: LLMEngineRunnerConfig, options: RuntimeOptions
) -> LLMEngineRunnerConfig:
    """The folder's configuration within the limits asked for.

    Raises `invalid_value` naming an option beyond the engine's own limit.
    """
    _check_options(options)
    config = _with_device(_with_backend(stored, options), options)
    batch = _limit("max_batch", options.max_batch, config.max_supported_batch_size)
    if config.device == "cuda":
        _check_rows(batch)
    _check_processor(options, config)
    capacity = _limit("capacity", options.capacity, config.max_kv_cache_capacity)
    if config.static_decode_batches:
        check_built("max_batch", batch, config.static_decode_batches)
        check_built("capacity", capacity, (config.max_kv_cache_capacity,))
    return structs.replace(
        config,
        max_supported_batch_size=batch,
        max_kv_cache_capacity=capacity,
        max_supported_input_length=min(config.max_supported_input_length, capacity - 1),
        prefill_chunk=min(config.prefill_chunk, capacity),
        max_verify_tree_size=min(config.max_verify_tree_size, capacity),
        # A proposal lies behind one entry at least.
        max_draft_tree_size=min(config.max_draft_tree_size, capacity - 1),
        static_decode_batches=tuple(one for one in config.static_decode_batches if one <= batch),
    )


def _with_backend(stored: LLMEngineRunnerConfig, options: RuntimeOptions) -> LLMEngineRunnerConfig:
    kind = stored.backend if options.engine_kind == "auto" else options.engine_kind
    if kind == "simulated":
        return as_simulated(
            stored, options.step_ms or stored.step_ms, options.prefill_us or stored.prefill_us
        )
    if kind != stored.backend:
        raise HearthError(
            "engine_incompatible",
            f"this folder holds an engine for {stored.backend}: export the model again for {kind}",
            "engine_kind",
        )
    for name in ("step_ms", "prefill_us"):
        if getattr(options, name):
            raise HearthError("unsupported_option", f"{name} needs the simulated engine", name)
    return stored


def _with_device(config: LLMEngineRunnerConfig, options: RuntimeOptions) -> LLMEngineRunnerConfig:
    if options.device in {"auto", config.device}:
        return config
    # A graph runs on both; the CPU has no operators in bfloat16.
    if config.backend == "onnxruntime" and config.dtype != "bfloat16":
        return structs.replace(config, device=options.device)
    raise HearthError(
        "engine_incompatible",
        f"this engine runs on {config.device} alone: export the model again for {options.device}",
        "device",
    )


def _check_options(options: RuntimeOptions) -> None:
    for name in ("threads", "max_batch", "capacity", "step_ms", "prefill_us"):
        if getattr(options, name) < 0:
            raise HearthError("invalid_value", f"{name} must not be negative", name)
    if not options.prefill_budget > 0:
        raise HearthError("invalid_value", "prefill_budget must be above 0", "prefill_budget")
    if options.capacity == 1:
        raise HearthError("invalid_value", "capacity must leave room for an answer", "capacity")


def _check_processor(options: RuntimeOptions, config: LLMEngineRunnerConfig) -> None:
    takes = config.backend == "onnxruntime"
    for name, honoured in (("threads", takes), ("spin", takes and config.device == "cpu")):
        if getattr(options, name) and not honoured:
            engine = f"{config.backend} on {config.device}"
            raise HearthError("unsupported_option", f"{name} is nothing to {engine}", name)


def check_built(name: str, asked: int | str, built: tuple[int | str, ...]) -> None:
    """A plan has the shapes that it was built with."""
    if asked not in built:
        raise HearthError(
            "invalid_value",
            f"{name} is {asked}, the plan was built for {', '.join(map(str, built))}",
            name,
        )


def _check_rows(batch: int) -> None:
    if batch > MOST_GPU_ROWS:
        raise HearthError(
            "invalid_value", f"max_batch is {batch}, a GPU serves {MOST_GPU_ROWS} rows", "max_batch"
        )


_EXPORTED_BY = {"capacity": "--capacity", "max_batch": "--max-batch"}


def _limit(name: str, asked: int, limit: int) -> int:
    if asked > limit:
        how = _EXPORTED_BY.get(name)
        more = f": export the model with {how} {asked}" if how else ""
        text = f"{name} is {asked}, the engine was built for {limit}{more}"
        raise HearthError("invalid_value", text, name)
    return asked or limit


Method = Literal["off", "lookup", "eagle"]
Asked = Method | Literal["auto"]
_LOOKUP_TOKENS = 4
_LEAST_TOKENS = 2
"""Least tokens that a row has to hold: one of prompt and one behind it."""
_SHARED = ("backend", "device", "dialect", "dtype", "vocab_size", "hidden_size")
"""Fields that a draft has in common with its base, beside the width of the hidden states."""


class DeploymentConfig(NamedTuple):
    """Engines that run: the base, its speculation method, and the draft if that needs one.

    Both engines have the smaller of their batches and capacities. The base's
    `max_verify_tree_size` is the size of the trees that are in use. `chosen` is the reason for a
    smaller batch and capacity than exported without an option. On a GPU the `tower` runs in the
    same process, on the CPU in the encoder's; beside it pictures take `image_memory` bytes.
    `weights` is a file of external weights in place of the folder's own. The prefix cache has
    `prefix` pages in each tier, those on disk in `prefix_folder`.
    `adapters` are bytes of each adapter that is loaded from the beginning. `shapes` are those of
    what base and draft bring from their folders, none where there is no folder.
    """

    base: LLMEngineRunnerConfig
    method: Method = "off"
    speculation: SpeculationOptions = SpeculationOptions()
    draft: LLMEngineRunnerConfig | None = None
    chosen: str = ""
    prefill_budget: float = 1.0
    tower: VisionConfig | None = None
    image_memory: int = 0
    weights: str = ""
    prefix: TierCapacity = TierCapacity(0)
    prefix_folder: str = ""
    adapters: tuple[int, ...] = ()
    shapes: tuple[EngineTables, ...] = ()

    @property
    def capacity(self) -> int:
        """Tokens that a row holds, less the slots that a round of speculation needs behind them."""
        room = 1
        if self.method == "lookup":
            room += self.speculation.lookup_tokens
        elif self.method == "eagle":
            room = self.drafting.room
        return self.base.max_kv_cache_capacity - (room - 1)

    @property
    def drafting(self) -> EagleDraftingConfig:
        """The trees of the draft engine; raises `internal` where there is none."""
        if self.draft is None or self.speculation.eagle is None:
            raise HearthError("internal", "this deployment has no draft engine")
        return self.speculation.eagle


class StoredEngines(NamedTuple):
    """The engines of a folder as they were exported, and the bytes of each adapter for them.

    `shapes` are those of what base and draft bring from their folders.
    """

    base: LLMEngineRunnerConfig
    draft: LLMEngineRunnerConfig | None = None
    tower: VisionConfig | None = None
    adapters: tuple[int, ...] = ()
    shapes: tuple[EngineTables, ...] = ()

    def resolve(self, options: RuntimeOptions) -> "DeploymentConfig":
        """Return the deployment with these options; raises as `resolve_deployment` does."""
        found = resolve_deployment(self.base, self.draft, options)._replace(
            weights=options.weights, adapters=self.adapters, shapes=self.shapes
        )
        if self.tower is None:
            return found
        tower = structs.replace(self.tower, device=found.base.device)
        return found._replace(tower=tower, image_memory=options.image_memory)


def load_deployment(folder: Path, options: RuntimeOptions) -> DeploymentConfig:
    """Read and check an engine folder; raises `engine_*`, `invalid_value`, `unsupported_option`."""
    return load_engines(folder, options).resolve(options)


def load_engines(
    folder: Path, options: RuntimeOptions, progress: ProgressCallback = no_progress
) -> StoredEngines:
    """Read an engine folder and check its files, telling the share of bytes; raises `engine_*`."""
    stored, tower = load_config(folder), load_vision_config(folder)
    configs: dict[Path, LLMEngineRunnerConfig | VisionConfig] = {folder: stored}
    draft = None
    if tower is not None:
        _check_tower(stored, tower)
        configs[folder / VISION_FOLDER] = tower
    if stored.enable_eagle_spec_decode:
        configs[folder / DRAFT_FOLDER] = draft = load_config(folder / DRAFT_FOLDER)
    total = sum(one.bytes for config in configs.values() for one in config.files.values())
    done = 0

    def read(count: int) -> None:
        nonlocal done
        done += count
        progress("verifying", done / total)

    for place, config in configs.items():
        # Other weights are the base's: a draft keeps its own.
        skip = stored.external_weight_files if options.weights and place == folder else ()
        verify_folder(place, config, digests=options.verify, read=read, skip=skip)
    adapters = adapter_folders(Path(options.adapters)).values() if options.adapters else ()
    sizes = tuple(tensor_bytes(adapter) for adapter in adapters)
    base = _with_weights(stored, folder, options, read)
    shapes = tuple(
        read_shapes(config, place)
        for place, config in configs.items()
        if isinstance(config, LLMEngineRunnerConfig)
    )
    return StoredEngines(base, draft, tower, sizes, shapes)


def _with_weights(
    stored: LLMEngineRunnerConfig,
    folder: Path,
    options: RuntimeOptions,
    read: Callable[[int], None],
) -> LLMEngineRunnerConfig:
    """The configuration with the record of the weights that are served, and of whose they are."""
    if not options.weights:
        return stored
    weights = ExternalWeightManager.open(folder, stored, options.weights)
    if weights is None:
        return stored
    if options.verify:
        weights.verify(read)
    records = dict.fromkeys(stored.external_weight_files, weights.record)
    return structs.replace(stored, files=stored.files | records, model_name=weights.source)


def _check_tower(base: LLMEngineRunnerConfig, tower: VisionConfig) -> None:
    """Raise `engine_corrupt` unless the decoder takes what the tower gives."""
    both = {
        "output_size": (tower.output_size, base.hidden_size),
        "deepstack_layers": (tower.num_deepstack_features, base.num_deepstack_features),
        "tokens": (tower.tokens.image, base.image_token_id),
        "dtype": (tower.embedding_dtype, base.dtype),
    }
    for name, (gives, takes) in both.items():
        if gives != takes:
            raise HearthError(
                "engine_corrupt",
                f"the vision tower is of another model, by its {name}: export the model again",
                name,
            )


def resolve_deployment(
    stored: LLMEngineRunnerConfig, draft: LLMEngineRunnerConfig | None, options: RuntimeOptions
) -> DeploymentConfig:
    """The engines within the limits asked for; raises naming the option that cannot be met."""
    found = _resolve(stored, draft, options)
    if found.capacity < _LEAST_TOKENS and options.speculation.method == "auto":
        off = structs.replace(options.speculation, method="off")
        found = _resolve(stored, draft, structs.replace(options, speculation=off))
    if found.capacity < _LEAST_TOKENS:
        raise HearthError(
            "invalid_value",
            f"speculation leaves {found.capacity} tokens of a row of "
            f"{found.base.max_kv_cache_capacity}: raise the capacity, or turn it off",
            "capacity",
        )
    tiers = prefix_capacity(found.base, found.draft, options)
    return found._replace(
        prefill_budget=options.prefill_budget, prefix=tiers, prefix_folder=options.prefix_folder
    )


def _resolve(
    stored: LLMEngineRunnerConfig, draft: LLMEngineRunnerConfig | None, options: RuntimeOptions
) -> DeploymentConfig:
    speculation = options.speculation
    check_speculation(speculation)
    base = effective_config(stored, options)
    method = _method(base, draft, speculation.method)
    _check_used(speculation, method)
    if method == "eagle" and draft is not None:
        return _with_draft(stored, draft, options)
    if method == "lookup":
        tokens = _lookup_tokens(base, speculation.lookup_tokens)
        speculation = structs.replace(speculation, lookup_tokens=tokens)
        base = structs.replace(base, max_verify_tree_size=tokens + 1)
    elif not base.static_decode_batches:
        base = structs.replace(base, max_verify_tree_size=0)
    return DeploymentConfig(base, method, speculation)


def _method(
    base: LLMEngineRunnerConfig, draft: LLMEngineRunnerConfig | None, asked: Asked
) -> Method:
    if asked == "off":
        return asked
    # A plan has the steps that it was built with, and only a base of a draft verifies trees.
    verifies = base.backend != "tensorrt" or draft is not None
    simulated = base.backend == "simulated"
    if asked == "auto" and (simulated or not verifies):
        return "off"
    if verifies and (asked == "lookup" or (draft is None and asked == "auto")):
        return "lookup"
    if draft is not None and not simulated:
        return "eagle"
    missing = "a draft: export the model with one" if verifies else "an engine that verifies trees"
    need = "a real engine" if simulated else missing
    raise HearthError("unsupported_option", f"{asked} needs {need}", "speculation")


def _check_used(options: SpeculationOptions, method: Method) -> None:
    """Refuse what was given for another method."""
    tree, tokens = options.eagle, options.lookup_tokens
    for user, name, given in (
        ("eagle", "draft_tree", tree),
        ("lookup", "lookup_tokens", tokens),
    ):
        if given and method != user:
            what = f"{name} is for speculation by {user}, not {method}"
            raise HearthError("unsupported_option", what, name)


def _lookup_tokens(base: LLMEngineRunnerConfig, asked: int) -> int:
    """The tokens asked for, else what suits the engine; the newest token is a node beside them."""
    own = base.enable_eagle_spec_decode
    limit = base.max_verify_tree_size if own else base.max_kv_cache_capacity
    _check_limit("lookup_tokens", asked + 1, limit)
    if base.static_decode_batches:
        check_built("lookup_tokens", asked or limit - 1, (limit - 1,))
        return limit - 1
    return asked or min(_LOOKUP_TOKENS, limit - 1)


def _with_draft(
    stored: LLMEngineRunnerConfig, stored_draft: LLMEngineRunnerConfig, options: RuntimeOptions
) -> DeploymentConfig:
    fits = structs.replace(stored, base_hidden_dim=stored.output_hidden_dim)
    for name in (*_SHARED, "base_hidden_dim"):
        if getattr(stored_draft, name) != getattr(fits, name):
            what = f"the draft's {name} is not that of the base: export the model again"
            raise HearthError("engine_corrupt", what, name)
    base = effective_config(_smaller(stored, stored_draft), options)
    draft = structs.replace(
        effective_config(_smaller(stored_draft, stored), options), prefill_chunk=base.prefill_chunk
    )
    eagle = options.speculation.eagle or suited_drafting(base, draft)
    chains = base.chains_only or draft.chains_only
    if chains and eagle.drafting_top_k > 1:
        raise HearthError(
            "invalid_value",
            "this engine takes chains, of one token after each node: export it with "
            "--verify trees, or ask for a draft_tree such as 1x6/7",
            "draft_tree",
        )
    _check_limit("draft_tree", eagle.tree_size, base.max_verify_tree_size)
    _check_limit("draft_tree", eagle.proposal_size, draft.max_draft_tree_size, "to propose")
    if base.static_decode_batches:
        top_k, step = draft.static_drafting
        nodes = base.max_verify_tree_size
        asked = f"{eagle.drafting_top_k}x{eagle.drafting_step}/{eagle.tree_size}"
        check_built("draft_tree", asked, (f"{top_k}x{step}/{nodes}",))
    return DeploymentConfig(
        structs.replace(base, max_verify_tree_size=eagle.tree_size),
        "eagle",
        structs.replace(options.speculation, eagle=eagle),
        draft,
    )


def suited_drafting(
    base: LLMEngineRunnerConfig, draft: LLMEngineRunnerConfig
) -> EagleDraftingConfig:
    """The trees to take where none are asked for, within what the engines were made for.

    A CPU pays for every node, so it gets a chain; so do kernels of our own, which run up to eight
    tokens in little more time than one, and a level of one token in a fraction of a whole tree's.
    Other steps of a GPU cost the same for a whole tree, where the engine takes one. A plan has the
    tree that it was built for.
    """
    chains = base.chains_only or draft.chains_only or base.device == "cpu"
    wanted = (1, 6, 7) if chains else (1, 7, 8) if base.backend == "kernels" else (4, 3, 16)
    if draft.static_drafting:
        top_k, step = draft.static_drafting
        wanted = (top_k, step, base.max_verify_tree_size)
    top_k, step, nodes = wanted
    top_k = min(top_k, draft.max_draft_tree_size)
    return EagleDraftingConfig(
        drafting_top_k=top_k,
        drafting_step=max(1, min(step, draft.max_draft_tree_size // top_k)),
        verify_tree_size=min(nodes, base.max_verify_tree_size),
    )


def _smaller(one: LLMEngineRunnerConfig, other: LLMEngineRunnerConfig) -> LLMEngineRunnerConfig:
    """`one` with the limits that both engines keep."""
    batch = min(one.max_supported_batch_size, other.max_supported_batch_size)
    capacity = min(one.max_kv_cache_capacity, other.max_kv_cache_capacity)
    return structs.replace(
        one,
        max_supported_batch_size=batch,
        max_kv_cache_capacity=capacity,
        max_supported_input_length=min(one.max_supported_input_length, capacity - 1),
    )


def _check_limit(name: str, asked: int, limit: int, use: str = "to verify") -> None:
    if asked > limit:
        raise HearthError(
            "invalid_value",
            f"{name} asks for {asked} tree nodes {use}, the engine takes {limit} at this capacity",
            name,
        )
