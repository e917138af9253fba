from dataclasses import dataclass
from pathlib import Path

import msgspec
import tokenizers

from runtime.config import ENGINE_FORMAT, LLMEngineRunnerConfig
from runtime.engine_folder import TEMPLATE_FILE, TOKENIZER_FILE
from runtime.errors import HearthError
from runtime.text.chat_template import ChatTemplate


class _Model(msgspec.Struct):
    unk_token: str | None = None
    unk_id: int | None = None


class _Outline(msgspec.Struct):
    model: _Model


@dataclass(frozen=True)
class TokenizerFile:
    """A loaded tokenizer.json.

    `size` is one more than its highest id, `unknown` the id for text without a token, if any.
    """

    library: tokenizers.Tokenizer
    size: int
    unknown: int | None

    @classmethod
    def read(cls, folder: Path) -> "TokenizerFile":
        """Load the file of an engine folder; raises `engine_corrupt` naming it."""
        data = _read(folder / TOKENIZER_FILE)
        try:
            library = tokenizers.Tokenizer.from_buffer(data)
            model = msgspec.json.decode(data, type=_Outline).model
        except Exception as error:  # the library raises Exception itself
            raise _unreadable(TOKENIZER_FILE) from error
        # Limits that were set while a model was trained would cut or pad prompts.
        library.no_truncation()
        library.no_padding()
        size = 1 + max(library.get_vocab(with_added_tokens=True).values(), default=-1)
        unknown = library.token_to_id(model.unk_token) if model.unk_token else model.unk_id
        return cls(library, size, unknown)


def check_fit(file: TokenizerFile, config: LLMEngineRunnerConfig) -> None:
    """Raise `tokenizer_mismatch` unless model and tokenizer know each other's ids."""
    if file.size > config.vocab_size:
        raise _mismatch(f"has token {file.size - 1}, the model has {config.vocab_size} tokens")
    for number in config.eos_token_ids:
        if file.library.id_to_token(number) is None:
            raise _mismatch(f"lacks the model's end token {number}")


def open_template(
    folder: Path, file: TokenizerFile, config: LLMEngineRunnerConfig
) -> ChatTemplate | None:
    """The chat template of an engine folder, None where it has none.

    Raises `engine_corrupt` naming the file when it cannot be read.
    """
    path = folder / TEMPLATE_FILE
    if not path.exists():
        return None
    try:
        source = _read(path).decode()
    except UnicodeDecodeError as error:
        raise _unreadable(TEMPLATE_FILE) from error
    return ChatTemplate(source, _template_tokens(file, config))


def _template_tokens(file: TokenizerFile, config: LLMEngineRunnerConfig) -> dict[str, str]:
    if config.engine_format == ENGINE_FORMAT:
        return config.template_tokens
    ids = {"bos_token": config.bos_token_id, "eos_token": config.eos_token_ids[0]}
    named = {
        name: file.library.id_to_token(number) for name, number in ids.items() if number is not None
    }
    return {name: token for name, token in named.items() if token is not None}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path.name) from error


def _unreadable(name: str) -> HearthError:
    return HearthError("engine_corrupt", f"{name} cannot be read: export the model again", name)


def _mismatch(what: str) -> HearthError:
    return HearthError(
        "tokenizer_mismatch",
        f"{TOKENIZER_FILE} {what}: export model and tokenizer together",
        TOKENIZER_FILE,
    )
