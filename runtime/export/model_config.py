"""The config.json of a Hugging Face folder, in the spellings of transformers 4 and 5."""

from pathlib import Path

import msgspec
from msgspec import structs

from hearth.runtime.config import RopeConfig
from hearth.runtime.errors import HearthError
from hearth.runtime.export.image_families import (
    IMAGE_FAMILIES,
    ImageFamily,
    MRopeLayout,
    TextArchitecture,
)
from hearth.runtime.export.json_file import (
    CONFIG_FILE,
    Fields,
    read_config,
    read_json,
    refuse_unserved,
)
from hearth.runtime.weights.weights_file import ModelFacts

_DEFAULT_THETA = 10_000.0
_COMMON = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_LINEAR = frozenset({"factor"})
_LLAMA3 = frozenset(
    {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
)
_MROPE = frozenset({"mrope_section", "mrope_interleaved"})
_AXES = 3
_SERVED = {"default": frozenset[str](), "linear": _LINEAR, "llama3": _LLAMA3}


def read_rope(fields: Fields, head_dim: int, mrope: MRopeLayout | None = None) -> RopeConfig:
    """The rotary settings of heads of `head_dim` elements, which are rotated whole.

    `mrope` is how a family lays out the axes of its positions. Raises `model_unsupported` naming
    the rope type or the parameter that is not served, `model_invalid` for sections that do not fit.
    """
    new = fields.table("rope_parameters")
    scaling = new or fields.table("rope_scaling") or Fields({}, "rope_scaling")
    top = new if new is not None and "rope_theta" in new.data else fields
    theta = top.number("rope_theta", _DEFAULT_THETA if mrope is None else None)
    for place in (scaling, fields):
        if place.number("partial_rotary_factor", 1.0) != 1:
            # transformers rotates whole heads of these families all the same.
            raise HearthError(
                "model_unsupported",
                "config.json sets partial_rotary_factor: only whole heads are rotated",
                "partial_rotary_factor",
            )
    if mrope is not None and "mrope_section" in scaling.data:
        return _read_mrope(scaling, theta, mrope, head_dim // 2)
    return _read_scaling(scaling, theta)


def _read_mrope(scaling: Fields, theta: float, layout: MRopeLayout, pairs: int) -> RopeConfig:
    sections = scaling.data["mrope_section"]
    whole = isinstance(sections, list) and all(type(one) is int and one > 0 for one in sections)
    if not whole or len(sections) != _AXES or sum(sections) != pairs:
        raise HearthError(
            "model_invalid",
            f"mrope_section must share {pairs} pairs among time, height and width",
            "mrope_section",
        )
    interleaved = layout == "interleaved"
    if scaling.flag("mrope_interleaved", default=interleaved) != interleaved:
        raise HearthError(
            "model_unsupported", "mrope_interleaved is not that of the family", "mrope_interleaved"
        )
    plain = {name: value for name, value in scaling.data.items() if name not in _MROPE}
    if plain.get("type") == "mrope":
        plain["type"] = "default"
    if plain.get("rope_type") == "mrope":
        plain["rope_type"] = "default"
    base = _read_scaling(Fields(plain, "rope_scaling"), theta)
    if base.type != "default":
        raise HearthError(
            "model_unsupported",
            f"rope type {base.type} with mrope_section is not served",
            "rope_type",
        )
    return structs.replace(
        base, type="mrope", mrope_section=tuple(sections), mrope_interleaved=interleaved
    )


def _read_scaling(scaling: Fields, theta: float) -> RopeConfig:
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind not in _SERVED:
        raise HearthError("model_unsupported", f"rope type {kind} is not served", "rope_type")
    for name, value in scaling.data.items():
        if value is not None and name not in _COMMON | _SERVED[kind]:
            raise HearthError(
                "model_unsupported", f"rope type {kind} with {name} is not served", name
            )
    if kind == "linear":
        return RopeConfig(type="linear", theta=theta, factor=scaling.number("factor"))
    if kind == "llama3":
        return _read_llama3(scaling, theta)
    return RopeConfig(theta=theta)


def _read_llama3(scaling: Fields, theta: float) -> RopeConfig:
    rope = RopeConfig(
        type="llama3",
        theta=theta,
        factor=scaling.number("factor"),
        low_freq_factor=scaling.number("low_freq_factor"),
        high_freq_factor=scaling.number("high_freq_factor"),
        original_max_position_embeddings=scaling.size("original_max_position_embeddings"),
    )
    if rope.high_freq_factor <= rope.low_freq_factor:
        raise HearthError(
            "model_invalid", "high_freq_factor must exceed low_freq_factor", "high_freq_factor"
        )
    return rope


class ModelConfig(ModelFacts, frozen=True, kw_only=True):
    """The shape of a decoder: sizes in elements, `max_position_embeddings` in tokens.

    `attention_bias` is a bias on q, k and v, `output_bias` one on what joins the heads, `mlp_bias`
    one on each projection of the MLP; `qk_norm` an RMS norm over each head of q and k. A token sees
    no more than `window` tokens, itself among them, None for all.
    `images` is the family of a model that takes images: `image_token_id` stands in their place, and
    `num_deepstack_features` of each are added behind as many first layers.
    """

    architecture: TextArchitecture
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    window: int | None = None
    images: ImageFamily | None = None
    image_token_id: int = 0
    num_deepstack_features: int = 0

    @property
    def rope_per_row(self) -> bool:
        """True if each row of a batch has rotary tables of its own."""
        return self.rope.type == "mrope"

    @property
    def query_size(self) -> int:
        """Elements of all query heads of one token."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of all key heads of one token; the value heads have as many."""
        return self.num_kv_heads * self.head_dim


ARCHITECTURES: dict[TextArchitecture, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}
# What the classes of transformers take where config.json says nothing.
_WINDOW, _FULL_LAYERS = 4096, 28


def load_model_config(folder: Path) -> ModelConfig:
    """Read a model's configuration.

    Raises `model_invalid` for a missing or malformed field and `model_unsupported`, naming the
    field, for anything that would change what the model computes and is not served.
    """
    fields = Fields(read_config(folder), CONFIG_FILE)
    family = IMAGE_FAMILIES.get(fields.text("model_type"))
    if family is not None:
        return _read_image_model(folder, fields, family)
    architecture = _read_architecture(fields)
    refuse_unserved(fields, _own_fields(architecture))
    return read_sizes(fields, architecture, read_end_tokens(folder, fields))


def _read_image_model(folder: Path, fields: Fields, family: ImageFamily) -> ModelConfig:
    text = family.text_fields(fields)
    ends = read_end_tokens(folder, text, fields)
    model = read_sizes(text, family.decoder, ends, family.mrope)
    if model.rope_per_row != (family.mrope is not None):
        raise HearthError("model_invalid", "config.json lacks mrope_section", "mrope_section")
    features = family.deepstack_features(fields)
    if features > model.num_layers:
        raise HearthError(
            "model_invalid",
            f"{features} deepstack features do not fit {model.num_layers} layers of text",
            "deepstack_visual_indexes",
        )
    return msgspec.structs.replace(
        model,
        images=family,
        image_token_id=family.image_token(fields, model.vocab_size),
        num_deepstack_features=features,
    )


def read_end_tokens(folder: Path, *fields: Fields) -> tuple[int, ...]:
    """End tokens of generation_config.json, else of config.json; `model_invalid` if none."""
    path = folder / "generation_config.json"
    places = [Fields(read_json(path), path.name)] if path.exists() else []
    for place in (*places, *fields):
        ids = place.token_ids("eos_token_id")
        if ids:
            return ids
    raise HearthError(
        "model_invalid", "neither generation_config.json nor config.json names an end token",
        "eos_token_id",
    )  # fmt: skip


def _read_architecture(fields: Fields) -> TextArchitecture:
    model_type = fields.text("model_type")
    for architecture, class_name in ARCHITECTURES.items():
        if model_type == architecture:
            classes = fields.data.get("architectures") or [class_name]
            if isinstance(classes, list) and class_name in classes:
                return architecture
            raise HearthError(
                "model_unsupported", f"only {class_name} is served of {model_type}", "architectures"
            )
    served = ", ".join((*ARCHITECTURES, *IMAGE_FAMILIES))
    raise HearthError("model_unsupported", f"model_type must be one of {served}", "model_type")


def read_sizes(
    fields: Fields,
    architecture: TextArchitecture,
    end_tokens: tuple[int, ...],
    mrope: MRopeLayout | None = None,
) -> ModelConfig:
    """The sizes in a configuration; raises `model_invalid` or `model_unsupported`.

    `mrope` is the layout of sections, where the family has them.
    """
    heads = fields.size("num_attention_heads")
    hidden = fields.size("hidden_size")
    head_dim = _read_head_dim(fields, architecture, hidden, heads)
    biased = {name for name in _own_fields(architecture) if fields.flag(name, default=False)}
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size"),
        num_layers=fields.size("num_hidden_layers"),
        num_attention_heads=heads,
        num_kv_heads=fields.size("num_key_value_heads", heads if architecture == "llama" else None),
        head_dim=head_dim,
        rotary_dim=head_dim,
        max_position_embeddings=fields.size("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        tied_head=fields.flag("tie_word_embeddings", default=False),
        attention_bias=architecture == "qwen2" or "attention_bias" in biased,
        output_bias="attention_bias" in biased,
        mlp_bias="mlp_bias" in biased,
        qk_norm=architecture == "qwen3",
        rope=read_rope(fields, head_dim, mrope),
        window=_read_window(fields, architecture),
        eos_token_ids=end_tokens,
        bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
    )
    _check_sizes(config)
    return config


def _own_fields(architecture: TextArchitecture) -> tuple[str, ...]:
    """The fields for biases that its class in transformers reads."""
    own = {"llama": ("attention_bias", "mlp_bias"), "qwen3": ("attention_bias",)}
    return own.get(architecture, ())


def _read_window(fields: Fields, architecture: TextArchitecture) -> int | None:
    """Number of tokens that a token of some layer sees at most, None for all.

    Raises `model_unsupported` for layers of other kinds, and where theirs has no width.
    """
    stated = fields.data.get("layer_types")
    kinds = stated if isinstance(stated, list) else [] if stated is None else [stated]
    sliding = "sliding_attention" in kinds
    window = None
    # Qwen states a width even where it is switched off; Mistral's class has no switch.
    if architecture == "mistral" or fields.flag(
        "use_sliding_window", default=architecture == "llama"
    ):
        absent = "sliding_window" not in fields.data and architecture != "llama"
        given = absent or fields.data.get("sliding_window") is not None
        window = fields.size("sliding_window", _WINDOW) if given else None
    if any(kind not in ("full_attention", "sliding_attention") for kind in kinds) or (
        sliding and window is None
    ):
        raise HearthError(
            "model_unsupported", "config.json sets layer_types, which is not served", "layer_types"
        )
    if architecture == "mistral" or sliding or window is None:
        return window
    if kinds:
        return None
    if architecture == "llama":
        return window
    full = fields.data.get("max_window_layers", _FULL_LAYERS)
    whole = isinstance(full, int) and fields.size("num_hidden_layers") <= full
    return None if whole else window


def _read_head_dim(fields: Fields, architecture: TextArchitecture, hidden: int, heads: int) -> int:
    # Qwen3 states it; the others may leave it to be what divides the hidden size.
    if architecture == "qwen3" or fields.data.get("head_dim") is not None:
        return fields.size("head_dim")
    if hidden % heads:
        raise HearthError(
            "model_invalid", "hidden_size must be a multiple of num_attention_heads", "hidden_size"
        )
    return hidden // heads


def _check_sizes(config: ModelConfig) -> None:
    if config.head_dim % 2:
        raise HearthError("model_invalid", "head_dim must be even, to be rotated", "head_dim")
    if config.num_attention_heads % config.num_kv_heads:
        raise HearthError(
            "model_invalid", "num_attention_heads must be a multiple of num_key_value_heads",
            "num_key_value_heads",
        )  # fmt: skip
    for name in ("eos_token_ids", "bos_token_id"):
        value = getattr(config, name)
        ids = value if isinstance(value, tuple) else () if value is None else (value,)
        if any(token >= config.vocab_size for token in ids):
            field = name.replace("ids", "id")
            raise HearthError("model_invalid", f"{field} lies beyond vocab_size", field)
