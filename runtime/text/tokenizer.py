import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from runtime.config import load_config
from runtime.errors import HearthError
from runtime.text.chat_template import ChatTemplate
from runtime.text.disguise import Disguise
from runtime.text.special_tokens import SpecialTokens
from runtime.text.text_files import TokenizerFile, check_fit, open_template

Content = str | Sequence[Mapping[str, str]]
"""Of a turn: text, or parts as a chat template has them, maps of `type` and, of text, `text`."""
_ROLES = frozenset({"system", "user", "assistant"})
# Decoding in a batch lets other threads run; below this many tokens that costs more than it is.
_SHORT = 64


class Tokenizer:
    """Text to token ids and back, for one model; safe to use from several threads.

    `vocab_size` counts the model's ids: every id below it can be decoded, to nothing where the
    tokenizer has no text for it.
    """

    def __init__(self, file: TokenizerFile, template: ChatTemplate | None, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._library = file.library
        self._size = file.size
        self._template = template
        self._special = SpecialTokens(file.library, file.size, file.unknown)
        self._encoding = threading.Lock()

    @classmethod
    def open(cls, folder: Path) -> "Tokenizer":
        """Read tokenizer and chat template of an engine folder.

        Raises `engine_corrupt` for a file that cannot be read and `tokenizer_mismatch` when the
        tokenizer does not fit the configuration, both naming the file.
        """
        config = load_config(folder)
        file = TokenizerFile.read(folder)
        check_fit(file, config)
        return cls(file, open_template(folder, file, config), config.vocab_size)

    def encode(self, text: str, field: str = "prompt") -> list[int]:
        """Ids of raw text: special tokens are recognised, and tokenizer.json may add some.

        Raises `invalid_value` naming `field` for text that is not valid Unicode.
        """
        return self._encode(_valid(text, field), special=True, add=True)

    def encode_piece(self, text: str) -> list[int]:
        """Ids of a piece of a prompt: special tokens are recognised, and none are added."""
        return self._encode(text, special=True, add=False)

    def encode_chat(self, turns: Sequence[tuple[str, Content]]) -> list[int]:
        """Ids of a conversation of (role, content), ready for the model's answer.

        Markers come from the template alone, which puts one for each part that is no text; what the
        turns spell stays text, but for plain ones in the model's own turns. Raises
        `unsupported_option` when the model has no chat template, `invalid_value` when the turns do
        not fit it.
        """
        if self._template is None:
            raise HearthError(
                "unsupported_option",
                "this model has no chat template: send a raw prompt",
                "messages",
            )
        disguise = self._special.disguise()
        rendered = self._template.render(
            [
                {"role": _known_role(role), "content": _hidden(role, content, disguise)}
                for role, content in turns
            ]
        )
        for torn in (False, True):
            spelled = self._special.spell(rendered, disguise, torn=torn)
            ids = self._special.real_ids(self._encode(spelled, special=False, add=False), rendered)
            if ids is not None:
                return ids
        raise HearthError(
            "invalid_value",
            "a message has text that this model can read only as a marker: leave it out",
            "messages",
        )

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of token ids, U+FFFD where they end inside a character.

        Raises `invalid_value` naming `tokens` for an id outside the vocabulary.
        """
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise HearthError(
                "invalid_value", f"token ids must lie below {self.vocab_size}", "tokens"
            )
        hidden = self._special.ids if skip_special else frozenset[int]()
        known = [number for number in ids if number < self._size and number not in hidden]
        # The library takes plain markers for special ones (SpecialTokens).
        if len(known) <= _SHORT:
            return self._library.decode(known, skip_special_tokens=False)
        return self._library.decode_batch([known], skip_special_tokens=False)[0]

    def has_text(self, token_id: int) -> bool:
        """Whether an id shows in text: it is not special, and the tokenizer knows it."""
        return token_id < self._size and token_id not in self._special.ids

    def _encode(self, text: str, *, special: bool, add: bool) -> list[int]:
        # The recognition of special tokens is a switch of the whole library object. A batch of
        # one lets other threads run meanwhile, which `encode` does not.
        with self._encoding:
            self._library.encode_special_tokens = not special
            try:
                (encoding,) = self._library.encode_batch_fast([text], add_special_tokens=add)
            except BaseException as error:
                # The library panics where its tokens claim the same white space: no Exception.
                if type(error).__module__ != "pyo3_runtime":
                    raise
                what = "this model's tokenizer fails on this text: leave out white space at markers"
                raise HearthError("invalid_value", what) from error
        return encoding.ids


def _hidden(role: str, content: Content, disguise: Disguise) -> str | list[dict[str, str]]:
    own = role == "assistant"
    if isinstance(content, str):
        return disguise.hide(_valid(content, "messages"), own=own)
    return [
        {**part, "text": disguise.hide(_valid(part["text"], "messages"), own=own)}
        if "text" in part
        else dict(part)
        for part in content
    ]


def _known_role(role: str) -> str:
    # Some templates build special tokens from the role.
    if role not in _ROLES:
        raise HearthError("invalid_value", "a role is system, user or assistant", "messages")
    return role


def _valid(text: str, field: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise HearthError(
            "invalid_value", "text must be valid Unicode, without lone surrogates", field
        ) from error
    return text
