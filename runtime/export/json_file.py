"""Typed fields of JSON files that other programs wrote, and the served fields of config.json."""

import re
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec

from hearth.runtime.errors import HearthError

CONFIG_FILE = "config.json"
JSON_LIMIT = 64 << 20
_LARGEST = (1 << 63) - 1
_ENGINE_CONFIGS = {"base_config.json", "draft_config.json"}
_ENGINE = "is an engine already: hearth serve --engine takes it as it is"
_WANTED = (
    "a model is the folder that Hugging Face has of it, with config.json, safetensors files and "
    "tokenizer.json"
)
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; `model_invalid`, naming the file, when there is none."""
    try:
        if path.stat().st_size > JSON_LIMIT:
            raise HearthError("model_invalid", f"{path.name} is too large", path.name)
        value = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        text = f"{path} cannot be read ({error.strerror})"
        raise HearthError("model_invalid", text, path.name) from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HearthError("model_invalid", f"{path} is not valid JSON", path.name) from error
    if not isinstance(value, dict):
        raise HearthError("model_invalid", f"{path} must hold an object", path.name)
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a Hugging Face folder; `model_invalid`, naming what else `folder` is."""
    other = _other_than_a_model(folder)
    if other:
        raise HearthError("model_invalid", f"{folder} {other}", CONFIG_FILE)
    fields = read_json(folder / CONFIG_FILE)
    if "engine_format" in fields:
        raise HearthError("model_invalid", f"{folder} {_ENGINE}", CONFIG_FILE)
    return fields


def _other_than_a_model(path: Path) -> str:
    """Describe a path that is no folder with a config.json; "" for one that is."""
    try:
        if path.is_file():
            with path.open("rb") as file:
                gguf = file.read(4) == b"GGUF"
            return f"is a {'GGUF file, which is not read' if gguf else 'file'}: {_WANTED}"
        if not path.is_dir():
            return _missing(path)
        names = {one.name for one in path.iterdir()}
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if CONFIG_FILE in names:
        return ""
    if names & _ENGINE_CONFIGS:
        return _ENGINE
    gguf = any(name.endswith(".gguf") for name in names)
    return f"{'holds GGUF files, which are not read' if gguf else 'has no config.json'}: {_WANTED}"


def _missing(path: Path) -> str:
    if _HUB_NAME.fullmatch(str(path)) and not path.parent.is_dir():
        fetch = f"hf download {path} --local-dir DIR"
        return f"does not exist here, and no model is fetched by its name: {fetch}, then name DIR"
    return "does not exist: name the folder of a model"


class Fields:
    """The fields of one JSON object; every reader raises `model_invalid` naming the field.

    A field that is null counts as absent. A default of None makes the field mandatory.
    """

    def __init__(self, data: dict[str, Any], source: str) -> None:
        self.data = data
        self._source = source

    def size(self, name: str, default: int | None = None) -> int:
        """A positive whole number of at most 63 bits."""
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST:
            raise self._wrong(name, "a positive whole number")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number that a float can hold."""
        value = self._get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(name, "a positive number")
        if not 0 < value <= sys.float_info.max:
            raise self._wrong(name, "a positive number")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """True or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, "a string")
        return value

    def table(self, name: str) -> "Fields | None":
        """A nested object, or None when it is absent."""
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(name, "an object")
        return Fields(value, f"{self._source}: {name}")

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them, without repetition; empty when absent."""
        value = self.data.get(name)
        values = value if isinstance(value, list) else [] if value is None else [value]
        for token in values:
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise self._wrong(name, "a token id or a list of them")
        return tuple(dict.fromkeys(values))

    def _get(self, name: str, default: Any) -> Any:
        value = self.data.get(name)
        if value is None:
            value = default
        if value is None:
            raise HearthError("model_invalid", f"{self._source} lacks {name}", name)
        return value

    def _wrong(self, name: str, wanted: str) -> HearthError:
        return HearthError("model_invalid", f"{self._source}: {name} must be {wanted}", name)


# Nothing that is exported depends on them.
_HARMLESS = frozenset(
    {
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "label2id",
        "max_length",
        "model_type",
        "name_or_path",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "temperature",
        "top_k",
        "top_p",
        "torch_dtype",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)
_READ = frozenset(
    {
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "layer_types",
        "max_position_embeddings",
        "max_window_layers",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "partial_rotary_factor",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "sliding_window",
        "tie_word_embeddings",
        "use_sliding_window",
        "vocab_size",
    }
)
# They change what a model computes, but not with these values.
_NEUTRAL: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu", "swish"), "pretraining_tp": (1,)}


def refuse_unserved(fields: Fields, also_read: Collection[str] = ()) -> None:
    """Raise `model_unsupported` naming the first field that may change what the model computes.

    A field that is neither read, nor `also_read`, nor known to be harmless must be null, false,
    zero or empty.
    """
    for name, value in fields.data.items():
        known = name in _HARMLESS or name in _READ or name in also_read or name.startswith("_")
        if not known and (value not in _NEUTRAL[name] if name in _NEUTRAL else value):
            raise HearthError(
                "model_unsupported", f"config.json sets {name}, which is not served", name
            )
