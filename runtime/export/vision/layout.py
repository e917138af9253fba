"""The tensors of each family's tower: what they are called, and their shapes."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from hearth.runtime.export.checkpoint import Checkpoint
from hearth.runtime.export.vision.tower_model import TowerModel

_PARTS = ("visual.", "vision_model.", "connector.")
# Older checkpoints carry the rotary frequencies, which follow from the head size.
_DERIVED = re.compile(r"visual\.rotary_pos_emb\.inv_freq")


class Merger(NamedTuple):
    """Merger of patches to tokens: a norm, and one or two products with a GELU between them.

    The norm is over the patches of a token side by side if it `joins`, else over each alone.
    """

    norm: str
    products: tuple[str, ...]
    joins: bool = False


class TowerNames(NamedTuple):
    """Names without `.weight` and `.bias`; those of layers begin with `layer` and its number.

    `qkv` is one matrix or three; `mlp` are up and down, or gate, up and down. The first of the
    mergers makes the embeddings, the others the deepstack features.
    """

    patch: str
    positions: str | None
    layer: str
    norms: tuple[str, str]
    qkv: tuple[str, ...]
    attended: str
    mlp: tuple[str, ...]
    mergers: tuple[Merger, ...]


def tower_names(tower: TowerModel) -> TowerNames:
    """The names of a family, as published and without `model.` before them."""
    match tower.config.family:
        case "idefics3":
            return TowerNames(
                patch="vision_model.embeddings.patch_embedding",
                positions="vision_model.embeddings.position_embedding",
                layer="vision_model.encoder.layers.{}",
                norms=("layer_norm1", "layer_norm2"),
                qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                attended="self_attn.out_proj",
                mlp=("mlp.fc1", "mlp.fc2"),
                mergers=(
                    Merger("vision_model.post_layernorm", ("connector.modality_projection.proj",)),
                ),
            )
        case "qwen2_5_vl":
            merged = ("visual.merger.mlp.0", "visual.merger.mlp.2")
            mlp: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
            positions = None
            mergers: tuple[Merger, ...] = (Merger("visual.merger.ln_q", merged),)
        case "qwen3_vl":
            positions, mlp = "visual.pos_embed", ("mlp.linear_fc1", "mlp.linear_fc2")
            features = range(tower.config.num_deepstack_features)
            mergers = (
                _merger("visual.merger", joins=False),
                *(_merger(f"visual.deepstack_merger_list.{one}", joins=True) for one in features),
            )
    return TowerNames(
        patch="visual.patch_embed.proj",
        positions=positions,
        layer="visual.blocks.{}",
        norms=("norm1", "norm2"),
        qkv=("attn.qkv",),
        attended="attn.proj",
        mlp=mlp,
        mergers=mergers,
    )


def _merger(name: str, *, joins: bool) -> Merger:
    return Merger(f"{name}.norm", (f"{name}.linear_fc1", f"{name}.linear_fc2"), joins)


def has_bias(tower: TowerModel, name: str) -> bool:
    """Return True if a product or norm has a bias."""
    if tower.config.family == "qwen2_5_vl":
        return not name.startswith("visual.patch_embed") and not re.search(r"norm\d$|ln_q$", name)
    return not name.startswith("connector.")


def expected_tensors(tower: TowerModel) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of a tower."""
    config, names = tower.config, tower_names(tower)
    side, hidden = config.patch_size, config.hidden_size
    time = () if config.family == "idefics3" else (config.temporal_patch_size,)
    yield from _with_bias(tower, names.patch, (hidden, 3, *time, side, side))
    if names.positions is not None:
        yield f"{names.positions}.weight", (config.position_side**2, hidden)
    for layer in range(config.num_layers):
        for part, shape in _layer_tensors(tower, names):
            yield from _with_bias(tower, f"{names.layer.format(layer)}.{part}", shape)
    for merger in names.mergers:
        size = tower.merged_size
        yield from _with_bias(tower, merger.norm, (size if merger.joins else hidden,))
        *inner, last = merger.products
        for name in inner:
            yield from _with_bias(tower, name, (size, size))
        yield from _with_bias(tower, last, (config.output_size, size))


def _layer_tensors(tower: TowerModel, names: TowerNames) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = tower.config.hidden_size, tower.intermediate_size
    for norm in names.norms:
        yield norm, (hidden,)
    for part in names.qkv:
        yield part, (3 * hidden // len(names.qkv), hidden)
    yield names.attended, (hidden, hidden)
    *ups, down = names.mlp
    for up in ups:
        yield up, (inner, hidden)
    yield down, (hidden, inner)


def _with_bias(
    tower: TowerModel, name: str, shape: tuple[int, ...]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", shape
    if has_bias(tower, name):
        yield f"{name}.bias", shape[:1]


def without_model(name: str) -> str:
    """The name of a tensor of the tower as it was published first, any other as it is."""
    bare = name.removeprefix("model.")
    return bare if bare.startswith(_PARTS) else name


def check_tower(checkpoint: Checkpoint, tower: TowerModel) -> None:
    """Raise `model_invalid` or `model_unsupported` naming the first tensor that does not fit."""
    checkpoint.check_all(
        expected_tensors(tower),
        lambda name: not name.startswith(_PARTS) or _DERIVED.fullmatch(name),
        f"the vision tower of {tower.config.family}",
    )
