import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hearth.runtime.engine_folder import TEMPLATE_FILE
from hearth.runtime.errors import HearthError

_MAX_REASON = 200
_PROBE = "x7q"


class ChatTemplate:
    """A compiled Jinja chat template with the conventions of Hugging Face models.

    `tokens` are special tokens by the names of their variables, as `bos_token`. Raises
    `engine_corrupt` when `source` is not a template.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, _GenerationBlock],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        self._tokens = dict(tokens)
        try:
            self._template = environment.from_string(source)
        except (TemplateSyntaxError, RecursionError) as error:
            raise HearthError(
                "engine_corrupt",
                f"{TEMPLATE_FILE} is not a chat template: export the model again",
                TEMPLATE_FILE,
            ) from error

        self._wants_parts = not self._shows(_PROBE) and self._shows(_as_parts(_PROBE))

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of a conversation up to the start of the model's turn.

        Content is text, or parts as Hugging Face has them: maps of `type` (`text`, `image`,
        `video`) and `text`. Raises `invalid_value` for `messages` that the template refuses or
        cannot render.
        """
        if self._wants_parts:
            messages = [{**one, "content": _as_parts(one["content"])} for one in messages]
        return self._render(messages)

    def _shows(self, content: Any) -> bool:
        try:
            return _PROBE in self._render([{"role": "user", "content": content}])
        except HearthError:
            return True

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._tokens,
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


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 # positional in templates
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002 # positional in templates
) -> str:
    if ensure_ascii:
        # Escapes would damage the stand-ins for special-token text (see special_tokens).
        raise TemplateError("ASCII output is not served")
    return json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
