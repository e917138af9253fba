"""Tokenizer and chat template on their way from a Hugging Face folder to an engine folder."""

import shutil
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from runtime.engine_folder import TEMPLATE_FILE, TOKENIZER_FILE
from runtime.errors import HearthError
from runtime.export.json_file import read_json
from runtime.export.model_config import ModelConfig

# Both hold a template under the same name; a processor's comes first, as it has the images.
_SETTINGS_FILES = ("chat_template.json", "tokenizer_config.json")


def copy_text_files(source: Path, target: Path, model: ModelConfig) -> None:
    """Copy the tokenizer and, where the model has one, its chat template.

    Raises `model_invalid` for a missing or damaged file, `tokenizer_mismatch` when tokenizer and
    model do not know each other's ids.
    """
    check_tokenizer(source / TOKENIZER_FILE, model)
    shutil.copyfile(source / TOKENIZER_FILE, target / TOKENIZER_FILE)
    template = read_template(source)
    if template is not None:
        (target / TEMPLATE_FILE).write_text(template, encoding="utf-8")


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
    path = source / TEMPLATE_FILE
    try:
        if path.exists():
            return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HearthError("model_invalid", f"{path.name} cannot be read", path.name) from error
    for settings in (source / name for name in _SETTINGS_FILES):
        if settings.exists():
            template = _from_setting(read_json(settings).get("chat_template"))
            if template is not None:
                return template
    return None


def _from_setting(value: Any) -> str | None:
    # Some models have several templates by name; "default" is the one for conversations.
    if isinstance(value, list):
        named = [entry for entry in value if isinstance(entry, dict)]
        value = next((e.get("template") for e in named if e.get("name") == "default"), None)
    if value is None or isinstance(value, str):
        return value
    raise HearthError("model_invalid", "chat_template must be text", "chat_template")
