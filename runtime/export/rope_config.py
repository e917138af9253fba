"""Rotary settings in both spellings: rope_theta and rope_scaling, or rope_parameters."""

from msgspec import structs

from runtime.config import RopeConfig
from runtime.errors import HearthError
from runtime.export.image_families import MRopeLayout
from runtime.export.json_file import Fields

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
