"""Names of all text architectures; configuration and tensor names of the families that see."""

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from hearth.runtime.errors import HearthError
from hearth.runtime.export.json_file import Fields, refuse_unserved
from hearth.runtime.vision_config import Family

MRopeLayout = Literal["sections", "interleaved"]
TextArchitecture = Literal["llama", "qwen2", "qwen3", "mistral"]

_FILE = "config.json"
_TIED = "tie_word_embeddings"
# Beside the text's own fields. Idefics3 repeats what belongs to its connector in its text part.
_OUTER = frozenset(
    {
        "image_seq_len",
        "image_token_id",
        "scale_factor",
        "text_config",
        "transformers.js_config",
        "video_token_id",
        "vision_config",
        "vision_end_token_id",
        "vision_start_token_id",
        "vision_token_id",
    }
)
_INNER = _OUTER | {"is_llama_config", "perceiver_config", "pixel_shuffle_factor"}
# As published, as transformers 5 saves them, and as transformers 4 did for a while.
_TEXT = re.compile(r"(?:model\.(?:language_model|text_model)|language_model\.model)\.")
_LANGUAGE_HEAD = "language_model.lm_head."
_VISION = re.compile(r"(model\.)?(visual|vision_model|connector)\.")


class ImageFamily(NamedTuple):
    """A family: its class in transformers, and what its text is.

    `mrope` says how the pairs of a head are shared among the three axes of a position, None where
    images are counted as text is. `defaults` are what transformers leaves out when it saves a text
    part that has them.
    """

    name: Family
    class_name: str
    decoder: TextArchitecture
    defaults: Mapping[str, Any]
    mrope: MRopeLayout | None = None

    def text_fields(self, fields: Fields) -> Fields:
        """The fields of the text part, which may lie among those of the whole.

        Raises `model_unsupported` naming a field that may change what the model computes.
        """
        classes = fields.data.get("architectures") or [self.class_name]
        if not isinstance(classes, list) or self.class_name not in classes:
            raise HearthError(
                "model_unsupported",
                f"only {self.class_name} is served of {fields.text('model_type')}",
                "architectures",
            )
        refuse_unserved(fields, _OUTER)
        text = fields.table("text_config")
        if text is None:
            return Fields(dict(self.defaults) | _stated(fields), _FILE)
        refuse_unserved(text, _INNER)
        # The head is tied where the whole model says so.
        outer = {name: one for name, one in _stated(fields).items() if name == _TIED}
        return Fields(dict(self.defaults) | _stated(text) | outer, f"{_FILE}: text_config")

    def image_token(self, fields: Fields, vocab_size: int) -> int:
        """Id of the token that embeddings replace; raises `model_invalid` unless it is a token."""
        token = fields.size("image_token_id")
        if token >= vocab_size:
            raise HearthError(
                "model_invalid", "image_token_id lies beyond vocab_size", "image_token_id"
            )
        return token

    def deepstack_features(self, fields: Fields) -> int:
        """Number of deepstack features of an image, which are added behind the first layers."""
        vision = fields.table("vision_config")
        if vision is None:
            raise HearthError("model_invalid", "config.json lacks vision_config", "vision_config")
        layers = vision.data.get("deepstack_visual_indexes") or []
        if not isinstance(layers, list):
            raise HearthError(
                "model_invalid",
                "deepstack_visual_indexes must be a list of layers",
                "deepstack_visual_indexes",
            )
        return len(layers)


_LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}
_QWEN2: dict[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
}
_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-6,
}
IMAGE_FAMILIES: Mapping[str, ImageFamily] = {
    "qwen3_vl": ImageFamily(
        "qwen3_vl", "Qwen3VLForConditionalGeneration", "qwen3", _QWEN3, "interleaved"
    ),
    "qwen2_5_vl": ImageFamily(
        "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "qwen2", _QWEN2, "sections"
    ),
    "idefics3": ImageFamily("idefics3", "Idefics3ForConditionalGeneration", "llama", _LLAMA),
    "smolvlm": ImageFamily("idefics3", "SmolVLMForConditionalGeneration", "llama", _LLAMA),
}
"""By `model_type`."""


def text_name(name: str) -> str:
    """A tensor's name as a text model of its family has it; others stay as they are."""
    if name.startswith(_LANGUAGE_HEAD):
        return name.removeprefix("language_model.")
    found = _TEXT.match(name)
    return name if found is None else f"model.{name[found.end() :]}"


def is_vision_tensor(name: str) -> bool:
    """Return True if a tensor belongs to the vision encoder or its connector."""
    return _VISION.match(name) is not None


def _stated(fields: Fields) -> dict[str, Any]:
    return {name: value for name, value in fields.data.items() if value is not None}
