import re
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import tokenizers

from hearth.runtime.config import ENGINE_FORMAT, LLMEngineRunnerConfig, load_config
from hearth.runtime.engine_folder import (
    RESPONSE_TEMPLATE_FILE,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    TOOL_TEMPLATE_FILE,
)
from hearth.runtime.errors import HearthError
from hearth.runtime.text.chat_template import (
    ChatTemplate,
    dump_json,
    hidden_json,
    template_messages,
    template_tools,
)
from hearth.runtime.text.conversation import (
    Conversation,
    check_conversation,
    check_text,
    has_tools,
    plain_conversation,
)
from hearth.runtime.text.reply_format import OWN_CALLS, ReplyFormat, format_by_name
from hearth.runtime.text.reply_probe import ReplyProbe
from hearth.runtime.text.told_tools import tell

# Lone surrogates: no valid text has them, so none can be taken for a piece of a message.
_STAND_INS = range(0xD800, 0xE000)
_STAND_IN = re.compile("[\ud800-\udfff]")
# A stand-in within the text of a list or map by `str`, told from a doubled backslash before a u.
_SPELLED = re.compile(r"\\\\|\\u(d[89a-f][0-9a-f]{2})")

# So many characters of a text, for each token that fits, tell that it is far too long; so many
# tokens more may come of one that is cut.
_LETTERS, _CUT = 16, 64


class SpecialText:
    """The spellings of tokens, prepared for finding them and their broken-off ends."""

    def __init__(self, spellings: Collection[str]) -> None:
        self._whole = alternatives(re.escape(s) for s in sorted(spellings, key=len, reverse=True))
        self._heads = frozenset(s[:end] for s in spellings for end in range(1, len(s)))
        self._tails = frozenset(s[start:] for s in spellings for start in range(1, len(s)))
        self._longest = max(map(len, self._heads), default=0)

    def replace_whole(self, text: str, escape: "MarkerEscape") -> str:
        """`text` with stand-ins for whole tokens."""
        known = escape.stand_ins
        return self._whole.sub(lambda match: known.get(match[0]) or escape.stand_in(match[0]), text)

    def head_at_end(self, text: str) -> int:
        """Characters at the end of `text` that begin a token."""
        return next((n for n in self._lengths(text) if text[-n:] in self._heads), 0)

    def tail_at_start(self, text: str) -> int:
        """Characters at the start of `text` that end a token."""
        return next((n for n in self._lengths(text) if text[:n] in self._tails), 0)

    def _lengths(self, text: str) -> range:
        return range(min(self._longest, len(text)), 0, -1)


class MarkerEscape:
    """Escape the markers in messages for a chat template, and restore them afterwards.

    Each hidden piece is one character, so templates may trim, split and compare around it.
    Hidden are whole markers, and at the ends of a message what text next to it could complete to
    one. A template that deletes text inside of a message is not provided for. Of the model's own
    turns only special tokens are hidden: templates look for plain ones, as `</think>` is.
    """

    def __init__(self, markers: SpecialText, special: SpecialText) -> None:
        self._markers = markers
        self._special = special
        self.stand_ins: dict[str, str] = {}
        """Stand-ins by the pieces that they stand for."""
        self._pieces: dict[str, str] = {}

    def hide(self, text: str, *, own: bool = False) -> str:
        """`text` with stand-ins; raises `invalid_value` when there are too many to tell apart.

        `own` is True for a turn of the model.
        """
        hidden = self._special if own else self._markers
        text = hidden.replace_whole(text, self)
        # Templates trim messages, so the ends are those of the text without white space.
        body = text.strip()
        before, _, after = text.partition(body) if body else (text, "", "")
        if size := hidden.head_at_end(body):
            body = body[:-size] + self.stand_in(body[-size:])
        if size := hidden.tail_at_start(body):
            body = self.stand_in(body[:size]) + body[size:]
        return before + body + after

    def reveal(self, text: str, border: str = "", torn: Collection[str] | None = None) -> str:
        """`text` with the hidden pieces back, `border` after the first character of each.

        Where `torn` is given, only those among it are torn.
        """
        spelt = {
            stand_in: whole
            if torn is not None and whole not in torn
            else whole[0] + border + whole[1:]
            for whole, stand_in in self.stand_ins.items()
        }
        return _STAND_IN.sub(lambda match: spelt[match[0]], text)

    def shown(self, text: str) -> str:
        """`text` as Python spells it in a list or a map, stand-ins kept."""
        return _SPELLED.sub(lambda m: chr(int(m[1], 16)) if m[1] else m[0], repr(str(text)))

    def respell(self, text: str, spell: Callable[[str], str]) -> str:
        """`text` with new stand-ins, for what the pieces behind them are by `spell`.

        A piece that stays as it is keeps its stand-in.
        """
        return _STAND_IN.sub(lambda match: self.stand_in(spell(self._pieces[match[0]])), text)

    def stand_in(self, piece: str) -> str:
        """The character that stands for `piece`, the same every time."""
        if piece not in self.stand_ins:
            if len(self.stand_ins) == len(_STAND_INS):
                raise HearthError(
                    "invalid_value", "the messages spell too many special tokens", "messages"
                )
            character = chr(_STAND_INS[len(self.stand_ins)])
            self.stand_ins[piece] = character
            self._pieces[character] = piece
        return self.stand_ins[piece]


def alternatives(patterns: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches any of `patterns`, the first that fits; none of none."""
    return re.compile("|".join(patterns) or "(?!)")


_PRIVATE = "\U0010fffd"


class SpecialTokens:
    """A tokenizer's markers, told apart by their source: the template or a user's text.

    Markers are its added tokens, special or plain, but plain ones of white space or of one letter,
    which mark nothing. Each gets a private twin: an added token with the same white space rules
    that is not special, with a spelling that nobody can guess. Text in which the template's markers
    have their twins' spellings is encoded with the recognition of markers off; then twins become
    the real ids, and what a user wrote has stayed text.

    `ids` are the special ones, which do not show in text. `size` is one more than the highest id
    before the twins are added. `unknown` is the id that stands for text without a token. Raises
    `engine_corrupt` when ids have gaps that twins would fall into.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, size: int, unknown: int | None) -> None:
        added = tokenizer.get_added_tokens_decoder()
        marks = {n: token for n, token in added.items() if token.special or _marks(token)}
        self.ids = frozenset(n for n, token in marks.items() if token.special)
        self._always_torn = {
            token.content: n
            for n, token in marks.items()
            if not token.special and token.normalized and _is_changed(tokenizer, token.content)
        }
        distinct = {n: one for n, one in marks.items() if one.content not in self._always_torn}
        # The switch of the library that turns recognition off is for special tokens alone.
        tokenizer.add_special_tokens([_copy(one, one.content) for one in distinct.values()])
        nonce = _PRIVATE + secrets.token_hex(8)
        self._twins = {token.content: f"{nonce}{n}{_PRIVATE}" for n, token in distinct.items()}
        self._border = nonce + _PRIVATE
        twins = [_copy(token, self._twins[token.content]) for token in distinct.values()]
        border = tokenizers.AddedToken(self._border, special=False, normalized=False)
        tokenizer.add_tokens([border, *twins])
        numbers = {t.content: n for n, t in tokenizer.get_added_tokens_decoder().items()}
        self._border_id = numbers[self._border]
        if self._border_id < size:
            raise HearthError(
                "engine_corrupt",
                f"{TOKENIZER_FILE} leaves out ids below {size}: use a tokenizer without gaps",
                TOKENIZER_FILE,
            )
        self._real = {numbers[self._twins[token.content]]: n for n, token in distinct.items()}
        self._refused = distinct.keys() - {unknown}
        self._written = _as_written(distinct.values())
        self._markers = SpecialText([token.content for token in marks.values()])
        self._tokens = {
            token.content: number
            for number, token in marks.items()
            if token.special or (token.content[0] == "<" and token.content[-1] == ">")
        }
        self._spellings = {number: marks[number].content for number in sorted(self.ids)}
        self._special = SpecialText(self._spellings.values())

    def found_in(self, text: str) -> dict[int, str]:
        """The special ones that occur in `text`."""
        return {number: one for number, one in self._spellings.items() if one in text}

    def tokens_in(self, text: str) -> dict[str, int]:
        """The special ones, and plain ones like `<name>`, which llguidance takes for special."""
        return {one: number for one, number in self._tokens.items() if one in text}

    def escape(self) -> MarkerEscape:
        """Fresh stand-ins for the markers in the text of one conversation."""
        return MarkerEscape(self._markers, self._special)

    def spell(self, rendered: str, escape: MarkerEscape, *, torn: bool) -> str:
        """Text to encode for a rendered template: twins for its tokens, users' text revealed.

        With `torn`, a border keeps each hidden piece from being read as one token.
        """
        marked = self._written.sub(lambda match: self._twins[match[0]], rendered)
        return escape.reveal(marked, self._border, None if torn else self._always_torn)

    def real_ids(self, ids: Iterable[int], rendered: str = "") -> list[int] | None:
        """`ids` with twins replaced; None where a user's text has become a marker."""
        found: list[int] = []
        for number in ids:
            if number in self._refused:
                return None
            if number != self._border_id:
                found.append(self._real.get(number, number))
        for content, number in self._always_torn.items():
            if found.count(number) > rendered.count(content):
                return None
        return found


def _marks(token: tokenizers.AddedToken) -> bool:
    """Return True if a plain token may mean something beside its text."""
    content = token.content
    return not (not content.strip() or (len(content) == 1 and content.isalnum()))


def _is_changed(tokenizer: tokenizers.Tokenizer, content: str) -> bool:
    """Return True if normalising changes a token's text, as where each word gets a leading sign.

    Then it is found where text becomes the same, which no twin is: recognition stays on.
    """
    normalizer = tokenizer.normalizer
    return normalizer is not None and normalizer.normalize_str(content) != content


def _copy(token: tokenizers.AddedToken, spelling: str) -> tokenizers.AddedToken:
    """A token with other text or as special; a twin of a special one is never normalised."""
    own = spelling == token.content
    return tokenizers.AddedToken(
        spelling,
        single_word=own and token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        special=own,
        normalized=token.normalized and (own or not token.special),
    )


def _as_written(special: Iterable[tokenizers.AddedToken]) -> re.Pattern[str]:
    # Longest first, and single words only between other characters, as the tokenizer matches.
    longest_first = sorted(special, key=lambda token: len(token.content), reverse=True)
    return alternatives(
        rf"(?<!\w){re.escape(token.content)}(?!\w)"
        if token.single_word
        else re.escape(token.content)
        for token in longest_first
    )


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
    folder: Path, file: TokenizerFile, config: LLMEngineRunnerConfig, name: str = TEMPLATE_FILE
) -> ChatTemplate | None:
    """The chat template of that name of an engine folder, None where it has none.

    Raises `engine_corrupt` naming the file when it cannot be read.
    """
    path = folder / name
    if not path.exists():
        return None
    try:
        source = _read(path).decode()
    except UnicodeDecodeError as error:
        raise _unreadable(name) from error
    return ChatTemplate(source, _template_tokens(file, config), name)


def _response_template(folder: Path) -> Any:
    path = folder / RESPONSE_TEMPLATE_FILE
    try:
        return msgspec.json.decode(_read(path)) if path.exists() else None
    except msgspec.DecodeError as error:
        raise _unreadable(path.name) from error


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


class EncodedPrompt(NamedTuple):
    """Token ids of a prompt; `in_reasoning` where the template began to reason by itself."""

    ids: list[int]
    in_reasoning: bool = False


# Decoding in a batch lets other threads run; below this many tokens that costs more than it is.
_SHORT = 64


class Tokenizer:
    """Text to token ids and back, for one model; safe to use from several threads.

    `vocab_size` counts the model's ids: every id below it can be decoded, to nothing where the
    tokenizer has no text for it. `tool_template`, if any, renders conversations with tools,
    `reply_format` and `response_template` are as in `ReplyProbe.find`, `ends` are the spellings of
    end tokens.
    """

    def __init__(
        self,
        file: TokenizerFile,
        template: ChatTemplate | None,
        vocab_size: int,
        *,
        tool_template: ChatTemplate | None = None,
        reply_format: str = "",
        response_template: Any = None,
        ends: Sequence[str] = (),
    ) -> None:
        self.vocab_size = vocab_size
        self._tool_template = tool_template or template
        self._probe = None if self._tool_template is None else ReplyProbe(self._tool_template, ends)
        self._told = (reply_format, response_template)
        self._library = file.library
        self._size = file.size
        self._template = template
        self._special = SpecialTokens(file.library, file.size, file.unknown)
        self._encoding = threading.Lock()

    @classmethod
    def open(cls, folder: Path, reply_format: str = "") -> "Tokenizer":
        """Read tokenizer and chat template of an engine folder.

        `reply_format` names a known format of replies in place of the one that is found. Raises
        `engine_corrupt` for a file that cannot be read and `tokenizer_mismatch` when the tokenizer
        does not fit the configuration, both naming the file.
        """
        config = load_config(folder)
        file = TokenizerFile.read(folder)
        check_fit(file, config)
        return cls(
            file,
            open_template(folder, file, config),
            config.vocab_size,
            tool_template=open_template(folder, file, config, TOOL_TEMPLATE_FILE),
            reply_format=reply_format,
            response_template=_response_template(folder),
            ends=[file.library.id_to_token(number) or "" for number in config.eos_token_ids],
        )

    @cached_property
    def reply_format(self) -> ReplyFormat:
        """The form of the model's replies, found out at the first use.

        Raises `invalid_value` for a setting that names no format.
        """
        setting, template = self._told
        if self._probe is None:
            return format_by_name(setting or "none")
        return self._probe.find(setting, template)

    def encode(self, text: str, field: str = "prompt", most: int | None = None) -> list[int]:
        """Ids of raw text: special tokens are recognised, and tokenizer.json may add some.

        Raises `invalid_value` naming `field` for text that is not valid Unicode, and
        `prompt_too_long` for text that has far more than `most` tokens.
        """
        return self._encode(check_text(text, field), special=True, add=True, most=most)

    def encode_piece(self, text: str) -> list[int]:
        """Ids of a piece of a prompt: special tokens are recognised, and none are added."""
        return self._encode(text, special=True, add=False)

    def encode_pairs(self, turns: Iterable[tuple[str, str]]) -> list[int]:
        """Ids of a conversation of (role, text) alone; it is checked, then encoded."""
        conversation = plain_conversation(turns)
        check_conversation(conversation)
        return self.encode_chat(conversation).ids

    def encode_chat(self, conversation: Conversation, most: int | None = None) -> EncodedPrompt:
        """Ids of a conversation that `check_conversation` has passed, ready for the answer.

        Markers come from the template alone, which puts one for each part that is no text; what
        turns, tools, names and arguments spell stays text, but for plain ones in text of the
        model's own turns. Raises `unsupported_option` when the model has no chat template or it
        does not read a variable, with the field, `invalid_value` when the turns do not fit the
        template, and `prompt_too_long` where they have far more than `most` tokens.
        """
        template = self._template_for(conversation)
        if unread := conversation.variables.keys() - template.variables:
            field = f"template.{min(unread)}"
            what = f"the model's chat template has no variable {min(unread)}: leave it out"
            raise HearthError("unsupported_option", what, field)
        escape = self._special.escape()
        tools = [] if conversation.tool_choice == "none" else conversation.tools
        messages = template_messages(conversation, template, escape)
        shown_tools = template_tools(tools, escape)
        if has_tools(conversation) and self._probe is not None:
            own = self.reply_format.source == "own"
            form = self.reply_format.calls or OWN_CALLS
            dump = partial(dump_json, escape=escape)
            messages = tell(messages, shown_tools, form, self._probe, dump, own=own)
            shown_tools = shown_tools if self._probe.shows_tools and not own else []
        rendered = template.render(
            messages,
            shown_tools,
            hidden_json(conversation.variables, escape),
            escape,
        )
        for torn in (False, True):
            spelled = self._special.spell(rendered, escape, torn=torn)
            given = self._encode(spelled, special=False, add=False, most=most)
            ids = self._special.real_ids(given, rendered)
            if ids is not None:
                return EncodedPrompt(ids, self._opens_reasoning(rendered))
        raise HearthError(
            "invalid_value",
            "a message has text that this model can read only as a marker: leave it out",
            "messages",
        )

    def _opens_reasoning(self, rendered: str) -> bool:
        # Hidden text is stand-ins, so that no user's text is taken for the mark.
        mark = self.reply_format.reasoning[0].strip()
        return mark != "" and rendered.rstrip().endswith(mark)

    def _template_for(self, conversation: Conversation) -> ChatTemplate:
        template = self._tool_template if has_tools(conversation) else self._template
        if template is None:
            raise HearthError(
                "unsupported_option",
                "this model has no chat template: send a raw prompt",
                "messages",
            )
        return template

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

    def spelling(self, token_id: int) -> str:
        """The tokenizer's own name of a token; "" of an id that it does not know."""
        return self._library.id_to_token(token_id) or ""

    def special_in(self, text: str) -> dict[int, str]:
        """The special tokens, ids and spellings, that occur in `text`."""
        return self._special.found_in(text)

    def added_in(self, text: str) -> dict[str, int]:
        """The tokens that grammars know by id, spellings and ids, that occur in `text`."""
        return self._special.tokens_in(text)

    def has_text(self, token_id: int) -> bool:
        """Return True if an id shows in text: it is not special, and the tokenizer knows it."""
        return token_id < self._size and token_id not in self._special.ids

    def _encode(self, text: str, *, special: bool, add: bool, most: int | None = None) -> list[int]:
        if most is not None and len(text) > 2 * (size := most * _LETTERS):
            self._refuse_long(self._encode(text[:size], special=special, add=add), most)
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

    def _refuse_long(self, begins: Sequence[int], most: int) -> None:
        """Refuse a text by the ids of its beginning, where that has twice as many as fit.

        Tokens of the whole text differ around the cut alone. So the time that a text takes which
        cannot be served goes by what could be, and not by its length.
        """
        if len(begins) > 2 * most + _CUT:
            what = f"the prompt has more than {most} tokens, as many as are possible: shorten it"
            raise HearthError("prompt_too_long", what, "prompt")
