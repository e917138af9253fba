import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, Protocol

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes, pass_context
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hearth.runtime.engine_folder import TEMPLATE_FILE
from hearth.runtime.errors import HearthError
from hearth.runtime.text.conversation import Conversation, Tool, ToolCall, Turn

_MAX_REASON = 200
_PROBE = "x7q"
# No template can spell this name, so none can read the variable.
_ESCAPE = "text escape"
_BEYOND_ASCII = re.compile("[^\x00-\x7f\ud800-\udfff]+")


class TextEscape(Protocol):
    """Stand-ins in the text that a template sees, and what they are for."""

    def hide(self, text: str, *, own: bool = False) -> str:
        """`text` with a stand-in for each marker; `own` is True for text of the model."""

    def shown(self, text: str) -> str:
        """`text` as Python spells it in a list or a map, stand-ins kept."""

    def respell(self, text: str, spell: Callable[[str], str]) -> str:
        """`text` with new stand-ins, for what the pieces behind them are by `spell`."""


class ChatTemplate:
    """A compiled Jinja chat template with the conventions of Hugging Face models.

    `tokens` are special tokens by the names of their variables, as `bos_token`; `file` is named in
    errors. Raises `engine_corrupt` when `source` is not a template.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], file: str = TEMPLATE_FILE) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, _GenerationBlock],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        self.source = source
        self._tokens = dict(tokens)
        try:
            self._template = environment.from_string(source)
        except (TemplateSyntaxError, RecursionError) as error:
            raise HearthError(
                "engine_corrupt", f"{file} is not a chat template: export the model again", file
            ) from error

        self._wants_parts = not self._shows(_PROBE) and self._shows(_as_parts(_PROBE))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        escape: TextEscape | None = None,
        *,
        prompt: bool = True,
    ) -> str:
        """The text of a conversation, with `prompt` up to the start of the model's turn.

        Content is text, or parts as Hugging Face has them: maps of `type` (`text`, `image`,
        `video`) and `text`. Stand-ins in messages, tools and variables are of `escape`. Raises
        `invalid_value` for `messages` that the template refuses or cannot render.
        """
        if self._wants_parts:
            messages = [{**one, "content": _as_parts(one["content"])} for one in messages]
        return self._render(messages, tools or None, variables or {}, escape, prompt=prompt)

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names that the template reads before it sets them."""
        parsed = self._template.environment.parse(self.source)
        return frozenset(meta.find_undeclared_variables(parsed))

    @cached_property
    def knows_developer(self) -> bool:
        """True if the template has a word on the role `developer`."""
        return re.search(r"['\"]developer['\"]", self.source) is not None

    @cached_property
    def reasoning_key(self) -> str:
        """The name under which the template looks for reasoning in turns; empty if it does not."""
        named = (
            name
            for name in ("reasoning_content", "reasoning", "thinking")
            if re.search(rf"\.{name}\b|['\"]{name}['\"]", self.source)
        )
        return next(named, "")

    @cached_property
    def takes_argument_text(self) -> bool:
        """True if arguments of calls render right as JSON text alone, not as an object."""
        arguments = {_PROBE: _PROBE}
        found = self._call_of(arguments)
        if _PROBE in found and f"'{_PROBE}'" not in found.replace(f"'{_PROBE}')", ""):
            return False
        return _PROBE in self._call_of(json.dumps(arguments))

    def _call_of(self, arguments: Any) -> str:
        call = {"name": "f", "arguments": arguments}
        try:
            return self.render(
                [
                    {"role": "user", "content": "q"},
                    {
                        "role": "assistant",
                        "content": "",
                        "tool_calls": [{"id": "a1b2c3d4e", "type": "function", "function": call}],
                    },
                ],
                [tool_map("f", "", {})],
                prompt=False,
            )
        except HearthError:
            return ""

    def _shows(self, content: Any) -> bool:
        try:
            return _PROBE in self._render([{"role": "user", "content": content}], None, {}, None)
        except HearthError:
            return True

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        escape: TextEscape | None,
        *,
        prompt: bool = True,
    ) -> str:
        try:
            return self._template.render(
                {
                    **variables,
                    **self._tokens,
                    _ESCAPE: escape,
                    "messages": messages,
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": prompt,
                }
            )
        except _RefusalError as error:
            raise HearthError(
                "invalid_value", f"the model refuses these messages: {error.reason}", "messages"
            ) from error
        except Exception as error:  # a template's expressions may raise anything
            raise HearthError(
                "invalid_value",
                "the model's chat template cannot render these messages: check their roles and "
                "order",
                "messages",
            ) from error


def tool_map(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as templates get it from `transformers`."""
    function = {"name": name}
    if description:
        function["description"] = description
    shape = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": {**function, "parameters": shape}}


class _Shown(str):  # noqa: SLOT000 # a plain field is simpler
    """Text with stand-ins of `escape`, which `repr` would spell out within a list or a map."""

    escape: TextEscape

    def __repr__(self) -> str:
        return self.escape.shown(str(self))


def template_messages(
    conversation: Conversation, template: ChatTemplate, escape: TextEscape
) -> list[dict[str, Any]]:
    """The turns as a template takes them, with stand-ins for what is no marker."""
    names: dict[str, str] = {}
    found: list[dict[str, Any]] = []
    for turn in conversation.turns:
        own = turn.role == "assistant"
        role = "system" if turn.role == "developer" and not template.knows_developer else turn.role
        message: dict[str, Any] = {"role": role, "content": _content(turn, escape, own=own)}
        if turn.reasoning and template.reasoning_key:
            message[template.reasoning_key] = escape.hide(turn.reasoning, own=True)
        if turn.tool_calls:
            names = {call.id: call.name for call in turn.tool_calls}
            message["tool_calls"] = [_call(call, template, escape) for call in turn.tool_calls]
        if turn.role == "tool":
            message["tool_call_id"] = escape.hide(turn.tool_call_id)
            message["name"] = escape.hide(turn.name or names.get(turn.tool_call_id, ""))
        found.append(message)
    return found


def template_tools(tools: Iterable[Tool], escape: TextEscape) -> list[dict[str, Any]]:
    """Tools as a template takes them, with stand-ins for markers at any depth, keys too."""
    return [
        hidden_json(tool_map(one.name, one.description, one.parameters), escape) for one in tools
    ]


def hidden_json(value: Any, escape: TextEscape) -> Any:
    """A JSON value with stand-ins for the markers in its text; its depth is bounded before."""
    if isinstance(value, str):
        hidden = escape.hide(value)
        if hidden == value:
            return value
        shown = _Shown(hidden)
        shown.escape = escape
        return shown
    if isinstance(value, dict):
        return {hidden_json(key, escape): hidden_json(one, escape) for key, one in value.items()}
    if isinstance(value, list):
        return [hidden_json(one, escape) for one in value]
    return value


def _content(turn: Turn, escape: TextEscape, *, own: bool) -> str | list[dict[str, str]]:
    if not turn.parts:
        return escape.hide(turn.content, own=own)
    return [
        {"type": "text", "text": escape.hide(part.text, own=own)}
        if part.kind == "text"
        else {"type": part.kind}
        for part in turn.parts
    ]


def _call(call: ToolCall, template: ChatTemplate, escape: TextEscape) -> dict[str, Any]:
    arguments = hidden_json(call.arguments, escape)
    if template.takes_argument_text:
        arguments = dump_json(arguments, escape)
    function = {"name": escape.hide(call.name), "arguments": arguments}
    return {"id": escape.hide(call.id), "type": "function", "function": function}


class _RefusalError(TemplateError):
    """The template called `raise_exception`; `reason` is its author's sentence, shortened."""

    def __init__(self, reason: object) -> None:
        super().__init__()
        words = " ".join(str(reason).split())
        self.reason = "".join(c for c in words if c.isprintable())[:_MAX_REASON]


class _GenerationBlock(Extension):
    """`{% generation %}` marks the model's turns for training; here it renders as its body."""

    tags = {"generation"}  # noqa: RUF012 # the base class declares it mutable

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _refuse(reason: object) -> None:
    raise _RefusalError(reason)


def _now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


@pass_context
def _to_json(  # noqa: PLR0917 # positional in templates
    context: Context,
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 # positional in templates
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002 # positional in templates
) -> str:
    return dump_json(
        value,
        context.get(_ESCAPE),
        ascii_only=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def dump_json(
    value: Any, escape: TextEscape | None, *, ascii_only: bool = False, **form: Any
) -> str:
    """JSON text of a value, stand-ins in it for what JSON makes of the pieces behind them."""

    def spell(piece: str) -> str:
        return json.dumps(piece, ensure_ascii=ascii_only)[1:-1]

    text = json.dumps(value, ensure_ascii=False, **form)
    if escape is not None:
        text = escape.respell(text, spell)
    if ascii_only:
        text = _BEYOND_ASCII.sub(lambda match: spell(match[0]), text)
    return text
