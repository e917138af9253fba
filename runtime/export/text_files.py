"""Tokenizer and chat template on their way from a Hugging Face folder to an engine folder."""

import shutil
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from hearth.runtime.engine_folder import (
    RESPONSE_TEMPLATE_FILE,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    TOOL_TEMPLATE_FILE,
)
from hearth.runtime.errors import HearthError
from hearth.runtime.export.json_file import read_json
from hearth.runtime.export.model_config import ModelConfig
from hearth.runtime.request import RequestOptions, check_options

# Both hold a template under the same name; a processor's comes first, as it has the images.
_GENERATION_FILE = "generation_config.json"
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_SETTINGS_FILES = ("chat_template.json", "tokenizer_config.json")


def copy_text_files(source: Path, target: Path, model: ModelConfig) -> None:
    """Copy the tokenizer and, where the model has them, its chat and response templates.

    A chat template named `tool_use` is kept beside the one for other conversations.

    Raises `model_invalid` for a missing or damaged file, `tokenizer_mismatch` when tokenizer and
    model do not know each other's ids.
    """
    check_tokenizer(source / TOKENIZER_FILE, model)
    shutil.copyfile(source / TOKENIZER_FILE, target / TOKENIZER_FILE)
    template = read_template(source)
    if template is not None:
        (target / TEMPLATE_FILE).write_text(template, encoding="utf-8")
    tools = read_tool_template(source)
    if tools is not None:
        (target / TOOL_TEMPLATE_FILE).write_text(tools, encoding="utf-8")
    settings = source / "tokenizer_config.json"
    replies = read_json(settings).get("response_template") if settings.exists() else None
    if replies is not None:
        (target / RESPONSE_TEMPLATE_FILE).write_bytes(msgspec.json.encode(replies))


_NAMES = frozenset(f"{one}_token" for one in ["bos", "eos", "unk", "sep", "pad", "cls", "mask"])


def read_sampling(source: Path) -> dict[str, float]:
    """Options of sampling in generation_config.json, those that vLLM takes from there.

    Raises `model_invalid` naming a value that is out of its range.
    """
    path = source / _GENERATION_FILE
    fields = read_json(path) if path.exists() else {}
    found = {name: fields[name] for name in _SAMPLING if fields.get(name) is not None}
    for name, value in found.items():
        _check_sampling(name, value)
    return found


def _check_sampling(name: str, value: Any) -> None:
    try:
        check_options(msgspec.convert({name: value}, RequestOptions))
    except (msgspec.ValidationError, HearthError) as error:
        text = f"{name} of {_GENERATION_FILE} is no such option: {error}"
        raise HearthError("model_invalid", text, name) from error


def read_template_tokens(source: Path, model: ModelConfig) -> dict[str, str]:
    """The special tokens that `transformers` passes to a chat template, by name.

    They are those of tokenizer_config.json. Unless it tells of all added tokens, as newer ones do,
    special_tokens_map.json comes before it; null means none. Where neither file exists, they follow
    from the ids of config.json. Raises `model_invalid` naming a token that is no text.
    """
    settings, own = source / "tokenizer_config.json", source / "special_tokens_map.json"
    if not settings.exists() and not own.exists():
        return _named_by_ids(source / TOKENIZER_FILE, model)
    fields = read_json(settings) if settings.exists() else {}
    if own.exists() and "added_tokens_decoder" not in fields:
        fields |= read_json(own)
    extra = fields.get("extra_special_tokens")
    found = {name: _token_text(name, one) for name, one in fields.items() if name in _NAMES}
    for others in (fields, extra if isinstance(extra, dict) else {}):
        for name, one in others.items():
            if name.endswith("_token") and name not in _NAMES and isinstance(one, str | dict):
                found[name] = _token_text(name, one)
    return {name: text for name, text in found.items() if text is not None}


def _token_text(name: str, value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    elif value is None:
        return None
    if not isinstance(value, str):
        raise HearthError("model_invalid", f"{name} must be text", name)
    return value


def _named_by_ids(path: Path, model: ModelConfig) -> dict[str, str]:
    tokenizer = Tokenizer.from_file(str(path))
    ids = {"bos_token": model.bos_token_id, "eos_token": model.eos_token_ids[0]}
    named = {name: tokenizer.id_to_token(one) for name, one in ids.items() if one is not None}
    return {name: text for name, text in named.items() if text is not None}


def check_tokenizer(path: Path, model: ModelConfig) -> None:
    """Raise unless the tokenizer can be read, fits the vocabulary and has the end tokens."""
    if not path.is_file():
        raise HearthError("model_invalid", f"the model lacks {path.name}", path.name)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise HearthError("model_invalid", f"{path.name} is not a tokenizer", path.name) from error
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= model.vocab_size:
        raise _mismatch(path, f"has token {largest}, the model has {model.vocab_size} tokens")
    named = {
        "end": model.eos_token_ids,
        "image": () if model.images is None else (model.image_token_id,),
    }
    for what, tokens in named.items():
        for token in tokens:
            if tokenizer.id_to_token(token) is None:
                raise _mismatch(path, f"lacks the model's {what} token {token}")


def _mismatch(path: Path, what: str) -> HearthError:
    return HearthError(
        "tokenizer_mismatch", f"{path.name} {what}: use the tokenizer of this model", path.name
    )


def read_template(source: Path) -> str | None:
    """The chat template: a file of its own, else the setting of the processor or the tokenizer."""
    return _read_named(source, source / TEMPLATE_FILE, "default")


def read_tool_template(source: Path) -> str | None:
    """The chat template for conversations with tools, where the model has another for these."""
    return _read_named(source, source / "additional_chat_templates" / "tool_use.jinja", "tool_use")


def _read_named(source: Path, path: Path, name: str) -> str | None:
    try:
        if path.exists():
            return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HearthError("model_invalid", f"{path.name} cannot be read", path.name) from error
    for settings in (source / one for one in _SETTINGS_FILES):
        if settings.exists():
            template = _from_setting(read_json(settings).get("chat_template"), name)
            if template is not None:
                return template
    return None


def _from_setting(value: Any, name: str) -> str | None:
    # Some models have several templates by name; "default" is the one for most conversations.
    if isinstance(value, list):
        named = [entry for entry in value if isinstance(entry, dict)]
        value = next((e.get("template") for e in named if e.get("name") == name), None)
    elif name != "default":
        return None
    if value is None or isinstance(value, str):
        return value
    raise HearthError("model_invalid", "chat_template must be text", "chat_template")
