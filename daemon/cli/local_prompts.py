"""Prompts of commands that generate in their own process, and their replies taken apart."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import click
import msgspec
from msgspec import structs

from hearth.runtime.grammar import check_schemas
from hearth.runtime.images import EmbeddedImage
from hearth.runtime.request import GeneratedRow, RequestOptions
from hearth.runtime.text.conversation import (
    Conversation,
    ResponseFormat,
    Tool,
    ToolCall,
    Turn,
    check_conversation,
)
from hearth.runtime.text.reply_grammar import answer_grammar, enforced_schemas, reply_grammar
from hearth.runtime.text.reply_parser import CallPiece
from hearth.runtime.text.reply_reader import ReplyReader
from hearth.runtime.text.tokenizer import Tokenizer
from hearth_client.protocol import Tool as WireTool

Prompt = str | list[int]


class LocalPrompt(NamedTuple):
    """A prompt of `hearth generate`; `chat` is the conversation that it is, if it is one."""

    ids: list[int]
    chat: Conversation | None = None
    in_reasoning: bool = False
    images: Sequence[EmbeddedImage] = ()


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer, chat: Conversation | None) -> LocalPrompt:
    """Encode a prompt; in a conversation it is the user's message behind what is in `chat`."""
    if not isinstance(prompt, str):
        return LocalPrompt(prompt)
    if chat is None:
        return LocalPrompt(tokenizer.encode(prompt))
    chat = with_turn(chat, Turn("user", prompt))
    found = tokenizer.encode_chat(chat)
    return LocalPrompt(found.ids, chat, in_reasoning=found.in_reasoning)


def with_turn(chat: Conversation, turn: Turn) -> Conversation:
    """The conversation with one turn more; raises as `check_conversation`."""
    found = structs.replace(chat, turns=[*chat.turns, turn])
    check_conversation(found)
    return found


def grammar_of(tokenizer: Tokenizer, prompt: LocalPrompt, form: ResponseFormat | None) -> str:
    """The grammar that a reply to this prompt has to follow, checked; "" for none."""
    check_schemas(enforced_schemas(prompt.chat or Conversation([]), form))
    if prompt.chat is None:
        return "" if form is None else answer_grammar(form)
    in_reasoning = prompt.in_reasoning
    return reply_grammar(tokenizer, prompt.chat, form, in_reasoning=in_reasoning) or ""


def conversation_with(
    system: str | None, tools: list[dict[str, Any]], variables: dict[str, Any]
) -> Conversation:
    """A conversation that has no question yet; raises `click.UsageError` for what is no tool."""
    try:
        known = [Tool(**structs.asdict(msgspec.convert(one, WireTool))) for one in tools]
    except msgspec.ValidationError as error:
        raise click.UsageError(f"a tool is not as it has to be: {error}") from error
    turns = [] if system is None else [Turn("system", system)]
    conversation = Conversation(turns, known, variables=variables)
    check_conversation(conversation)
    return conversation


class Answer(NamedTuple):
    """A row that has ended, and what its reply is beside its text."""

    row: GeneratedRow
    reasoning: str = ""
    calls: Sequence[ToolCall] = ()


def read_reply(
    tokenizer: Tokenizer,
    prompt: LocalPrompt,
    options: RequestOptions,
    row: GeneratedRow,
    ends: Sequence[int],
) -> Answer:
    """Take the reply of a row in a conversation apart."""
    if prompt.chat is None and not options.grammar:
        return Answer(row)
    reader = ReplyReader(
        tokenizer,
        None if prompt.chat is None else tokenizer.reply_format,
        options.stop,
        prompt.chat.tools if prompt.chat is not None else (),
        in_reasoning=prompt.in_reasoning,
    )
    ids = row.token_ids
    # The last token of a grammar is text, an end token is none.
    said = ids[:-1] if row.finish_reason == "stop" and ids and ids[-1] in ends else ids
    pieces = [*map(reader.push, said), reader.finish()]
    calls = _calls(piece for one in pieces for piece in one.calls)
    text = "".join(one.text for one in pieces)
    return Answer(structs.replace(row, text=text), "".join(one.reasoning for one in pieces), calls)


def _calls(pieces: Iterable[CallPiece]) -> list[ToolCall]:
    """The calls that came to their end."""
    found: dict[int, ToolCall] = {}
    parts: dict[int, str] = {}
    for piece in pieces:
        parts[piece.index] = parts.get(piece.index, "") + piece.arguments
        if piece.name:
            found[piece.index] = ToolCall(piece.id, piece.name, {})
        if piece.complete:
            arguments = msgspec.json.decode(parts[piece.index] or "{}")
            found[piece.index] = structs.replace(found[piece.index], arguments=arguments)
    return [*found.values()]
