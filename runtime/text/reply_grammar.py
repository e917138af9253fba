"""One Lark grammar, in the dialect of llguidance, for what a request asks of its reply."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hearth.runtime.errors import HearthError
from hearth.runtime.grammar import json_term, regex_term, unforced
from hearth.runtime.text.conversation import Conversation, ResponseFormat, Tool, takes_one_call
from hearth.runtime.text.reply_format import CallForm
from hearth.runtime.text.reply_parser import types_of
from hearth.runtime.text.tokenizer import Tokenizer

_OBJECT: dict[str, Any] = {"type": "object"}
# Words of a schema that say nothing of a value's text.
_SILENT = frozenset({"type", "title", "description", "default", "examples", "enum", "const"})
_BESIDE = frozenset({"properties", "required", "additionalProperties", "$defs", "definitions"})
_BASE = {
    "text": "/(.|\\n)*/",
    "gap": "/[ \\t\\r\\n]{1,8}/",
    "call_id": "/[A-Za-z0-9]{9}/",
    "some_id": "/[A-Za-z0-9_.:-]{1,64}/",
    "key": "/[A-Za-z0-9_.-]{1,64}/",
    "quoted": r"/'([^'\\\n]|\\.)*'|\"([^\"\\\n]|\\.)*\"/",
    "number": "/-?(0|[1-9][0-9]*)(\\.[0-9]+)?([eE][+-]?[0-9]+)?/",
    "integer": "/-?(0|[1-9][0-9]*)/",
}


def enforced_schemas(
    conversation: Conversation, response_format: ResponseFormat | None = None
) -> dict[str, dict[str, Any] | bool]:
    """The schemas that a reply has to follow, by field: to be checked before it is accepted.

    Arguments follow the tools' schemas in calls of `strict` tools, and in all that are forced.
    """
    found: dict[str, dict[str, Any] | bool] = {}
    for index, tool in enumerate(conversation.tools):
        if _is_open(conversation, tool) and _holds(conversation, tool):
            found[f"tools[{index}].parameters"] = tool.parameters or _OBJECT
    if response_format is not None and response_format.kind == "json_schema":
        schema = response_format.schema
        found["response_format.schema"] = True if schema is None else schema
    return found


def reply_grammar(
    tokenizer: Tokenizer,
    conversation: Conversation,
    response_format: ResponseFormat | None = None,
    *,
    in_reasoning: bool = False,
) -> str | None:
    """The grammar of a reply; None where nothing is asked of it.

    Asked are a response format, a reasoning budget, a tool choice other than "none" and "auto", and
    in "auto" calls of `strict` tools. Raises `grammar_invalid` for a schema that the model's form
    of calls cannot hold, `unsupported_option` for a budget of a model that marks no reasoning, or
    calls of a form without a grammar, with the field. Needs the extra `grammar` for a regex.
    """
    tools = [tool for tool in conversation.tools if _is_open(conversation, tool)]
    forced = _is_forced(conversation)
    budget = conversation.reasoning_budget
    strict = any(_holds(conversation, tool) for tool in tools)
    if response_format is None and budget is None and not strict and not forced:
        return None
    writer = _Writer(tokenizer)
    alone = not (tools or writer.reasons)
    if response_format is not None and response_format.kind == "lark" and alone:
        return unforced(response_format.grammar)
    answer = "text" if response_format is None else writer.answer(response_format)
    if forced:
        body = writer.calls(tools, conversation)
    elif not tools:
        body = answer
    elif response_format is None:
        body = writer.lazily(tools, conversation)
    else:
        body = writer.rule("body", f"{answer} | {writer.calls(tools, conversation)}")
    return writer.written(writer.after_reasoning(body, budget, in_reasoning=in_reasoning))


def answer_grammar(response_format: ResponseFormat) -> str:
    """The grammar of an answer alone, as that to a raw prompt is."""
    if response_format.kind == "lark":
        return unforced(response_format.grammar)
    return f"start: {_answer_term(response_format)}"


def _answer_term(asked: ResponseFormat) -> str:
    """The Lark term of a regex or of JSON."""
    if asked.kind == "regex":
        return regex_term(asked.grammar)
    schema = _OBJECT if asked.kind == "json_object" else asked.schema
    return json_term(True if schema is None else schema)


def _is_forced(conversation: Conversation) -> bool:
    return conversation.tool_choice not in {"none", "auto"}


def _is_open(conversation: Conversation, tool: Tool) -> bool:
    choice = conversation.tool_choice
    return choice in {"auto", "required"} or choice == f"={tool.name}"


def _holds(conversation: Conversation, tool: Tool) -> bool:
    return tool.strict or _is_forced(conversation)


class _Writer:
    """Rules of one grammar; each method gives what stands for its part in another rule."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._shape = tokenizer.reply_format
        self._rules: dict[str, str] = {}
        self._client = ""

    @property
    def reasons(self) -> bool:
        """True if something may stand before the answer."""
        return bool(self._shape.reasoning[1]) or self._channels is not None

    @property
    def _channels(self) -> CallForm | None:
        form = self._shape.calls
        return form if form is not None and form.kind == "channels" else None

    def rule(self, name: str, body: str) -> str:
        """Add a rule, under another name where it is taken."""
        while name in self._rules and self._rules[name] != body:
            name += "_"
        self._rules[name] = body
        return name

    def written(self, start: str) -> str:
        """The grammar that begins with `start`."""
        rules = {"start": start, **self._rules}
        text = "\n".join(f"{name}: {body}" for name, body in rules.items())
        used = set(re.findall(r"[a-z_]+", re.sub(r'"(?:[^"\\]|\\.)*"', "", text)))
        base = "\n".join(f"{name}: {body}" for name, body in _BASE.items() if name in used)
        grammar = f"{text}\n{base}\n"
        if not self._client:
            return grammar
        client = {"name": "answer", "lark_grammar": self._client}
        parts = [{"lark_grammar": unforced(grammar)}, client]
        return json.dumps({"grammars": parts}, ensure_ascii=False)

    def answer(self, asked: ResponseFormat) -> str:
        """The answer of a response format."""
        if asked.kind == "lark":
            self._client = asked.grammar
            return self.rule("answer", "@answer")
        return self.rule("answer", _answer_term(asked))

    def after_reasoning(self, body: str, budget: int | None, *, in_reasoning: bool) -> str:
        """`body` behind reasoning of `budget` tokens at the most, which may be left out."""
        opened, closed = (mark.strip() for mark in self._shape.reasoning)
        if not closed or (not in_reasoning and budget == 0):
            if not closed and (budget or in_reasoning):
                text = "this model marks no reasoning that a budget could end"
                raise HearthError("unsupported_option", text, "reasoning_budget")
            return body if self._channels is None else self._last(self._channels, body, budget)
        end = self._mark(closed)
        if budget is not None and not end.startswith("<["):
            text = "the end of this model's reasoning is no token that a budget could force"
            raise HearthError("unsupported_option", text, "reasoning_budget")
        if not end.startswith("<["):
            thought = self._up_to("thought", closed)
        elif budget == 0:
            thought = end
        else:
            limit = "" if budget is None else f"[max_tokens={budget}]"
            self._rules[f"thinking{limit}"] = _BASE["text"]
            thought = f"thinking {end}"
        behind = f"{thought} gap? {body}"
        if in_reasoning:
            return behind
        start = self._mark(opened)
        return f"gap? {start} {behind} | {body}" if start else body

    def _last(self, form: CallForm, body: str, budget: int | None) -> str:
        """`body` in the last of the messages of channels; those before it are reasoning."""
        head = self._mark(form.key_open + form.head_close)
        final = self._mark(form.key_open.replace("analysis", "final") + form.head_close)
        between = self._mark(f"{form.section[1]}{form.section[0]}assistant")
        before = "" if budget == 0 else f"({head} text {between})* "
        return f"{before}{final} {body}"

    def lazily(self, tools: Sequence[Tool], conversation: Conversation) -> str:
        """Text in which calls begin where the model writes their first mark."""
        form = self._form()
        opens = (form.section[0] + form.call[0]).lstrip()
        if not opens:
            plain = self.rule("plain", "/([^{ \\t\\r\\n]|[ \\t\\r\\n]+[^{ \\t\\r\\n])(.|\\n)*/")
            return self.rule("body", f"{self.calls(tools, conversation)} | {plain}?")
        if self._mark(opens).startswith("<["):
            return self.rule("body", f"text ({self.calls(tools, conversation)} text)*")
        first = re.split(r"\s", opens)[0]
        tokens = [opens.index(token) for token in self._tokenizer.added_in(opens)]
        first = first[: min(tokens, default=len(first))]
        head = self._up_to("head", first)
        rest = self.calls(tools, conversation, begun=first)
        return self.rule("body", f"({head} {rest})* text")

    def calls(self, tools: Sequence[Tool], conversation: Conversation, *, begun: str = "") -> str:
        """Calls of tools: one, or where they may be parallel several; `begun` stands already."""
        form = self._form()
        writers = {
            "json": self._json,
            "named": self._named,
            "tagged": self._tagged,
            "python": self._python,
            "bare": self._bare,
        }
        if form.kind not in writers:
            text = "there is no grammar for this model's form of calls"
            raise HearthError("unsupported_option", text, "tools")
        places = {tool.name: index for index, tool in enumerate(conversation.tools)}
        each = []
        for tool in tools:
            schema = tool.parameters or _OBJECT if _holds(conversation, tool) else None
            field = f"tools[{places[tool.name]}].parameters"
            each.append(
                self.rule(
                    f"call_{_letters(places[tool.name])}",
                    writers[form.kind](form, tool.name, schema, field),
                )
            )
        choice = self.rule("choice", " | ".join(each))
        called = f"{choice} {self._mark(form.call[1].rstrip())}"
        opens = (form.section[0] + form.call[0]).lstrip().removeprefix(begun)
        again = f"{self._mark(form.separator)} {self._mark(form.call[0])} {called}"
        more = "" if takes_one_call(conversation) else f" ({again})*"
        close = self._mark(form.section[1].rstrip())
        return self.rule("calls", f"{self._mark(opens)} {called}{more} {close}".strip())

    def _form(self) -> CallForm:
        form = self._shape.calls
        if form is None:
            raise HearthError("unsupported_option", "this model calls no tools", "tools")
        return form

    def _mark(self, spelling: str) -> str:
        """Text and tokens of a mark."""
        tokens = self._tokenizer.added_in(spelling)
        parts = sorted(tokens, key=lambda one: -len(one))
        pieces = (
            re.split("(" + "|".join(map(re.escape, parts)) + ")", spelling) if parts else [spelling]
        )
        return " ".join(
            f"<[{tokens[piece]}]>" if piece in tokens else _quoted(piece)
            for piece in pieces
            if piece
        )

    def _up_to(self, name: str, mark: str) -> str:
        """Any text up to a mark, and the mark."""
        spelled = self._mark(mark)
        if not spelled.startswith("<["):
            (literal, *_) = re.findall(r'^"((?:[^"\\]|\\.)*)"', spelled)
            text = json.loads(f'"{literal}"')
            rest = spelled[len(literal) + 2 :]
            key = self.rule(f"{name}[lazy]", f"/(.|\\n)*{_pattern(text)}/")
            return f"{key.split('[')[0]}{rest}"
        return f"text {spelled}"

    def _json(self, form: CallForm, name: str, schema: Any, _: str) -> str:
        if form.name_key:
            head = f"{{{_dump(form.name_key)}: {_dump(name)}, {_dump(form.arguments_key)}: "
        else:
            head = f"{{{_dump(name)}: "
        given = self._arguments(name, schema)
        return f'{_quoted(head)} {given} "}}"'

    def _named(self, form: CallForm, name: str, schema: Any, _: str) -> str:
        return f"{self._head(form, name)} {self._arguments(name, schema)}"

    def _arguments(self, name: str, schema: Any) -> str:
        return self.rule(f"arguments_{_safe(name)}", json_term(schema or _OBJECT))

    def _head(self, form: CallForm, name: str) -> str:
        before = f"call_id {self._mark(form.id_close)} " if form.id_place == "before" else ""
        head = f"{before}{_quoted(name)} {self._mark(form.name_close)}"
        if form.head_close:
            head += f" some_id {self._mark(form.head_close)}"
        return head

    def _tagged(self, form: CallForm, name: str, schema: Any, field: str) -> str:
        head = self._head(form, name)

        def value(one: Any, root: Mapping[str, Any]) -> str:
            kind = '" string=\\"false\\"" ' if form.value_open else ""
            opens = self._mark(form.value_open)
            if one is None:
                return f"{opens} {self._up_to('value', form.value_close)}"
            words = [word for word in ("enum", "const") if word in one]
            given = one.get("enum", [one.get("const")] if words else [])
            if given and all(isinstance(each, str) for each in given):
                texts = " | ".join(_quoted(each) for each in given if each)
                shown = kind.replace("false", "true")
                return f"{shown}{opens} ({texts}) {self._mark(form.value_close)}"
            if types_of(one, dict(root)) == {"string"}:
                _refuse_others(one, _SILENT, field)
                shown = kind.replace("false", "true")
                return f"{shown}{opens} {self._up_to('value', form.value_close)}"
            beside = {word: root[word] for word in ("$defs", "definitions") if word in root}
            term = self.rule(f"value_of_{_safe(name)}", json_term({**beside, **one}))
            return f"{kind}{opens} {term} {self._mark(form.value_close)}"

        def item(key: str, inside: str) -> str:
            return f"{self._mark(form.key_open)} {key} {self._mark(form.key_close)} {inside}"

        if schema is None:
            return f"{head} ({item('key', value(None, {}))})*"
        return f"{head} {_in_order(schema, field, item, value)}"

    def _python(self, _: CallForm, name: str, schema: Any, field: str) -> str:
        self.rule("literal", 'quoted | number | "True" | "False" | "None" | list | map')
        self.rule("list", '"[" (literal (", " literal)*)? "]"')
        self.rule("map", '"{" (quoted ": " literal (", " quoted ": " literal)*)? "}"')
        words = _Words("=", ", ", "quoted", "", "True", "False")
        return f'{_quoted(name + "(")} {self._short(words, schema, field)} ")"'

    def _bare(self, form: CallForm, name: str, schema: Any, field: str) -> str:
        quote = self._mark(form.quote)
        text = f"{quote} text {quote}"
        self.rule("literal", f'{text} | number | "true" | "false" | "None" | list | map')
        self.rule("list", '"[" (literal ("," literal)*)? "]"')
        self.rule("map", '"{" (key ":" literal ("," key ":" literal)*)? "}"')
        words = _Words(":", ",", text, quote, "true", "false")
        return f'{_quoted(name + "{")} {self._short(words, schema, field)} "}}"'

    def _short(self, words: "_Words", schema: Any, field: str) -> str:
        """Arguments between brackets, each a literal."""
        if schema is None:
            one = f"key {_quoted(words.equals)} literal"
            return f"({one} ({_quoted(words.comma)} {one})*)?"

        def value(one: Any, root: Mapping[str, Any]) -> str:
            _refuse_others(one, _SILENT, field)
            given = one.get("enum", [one["const"]] if "const" in one else [])
            kinds = sorted(types_of(one, dict(root)) or [""])
            if given and not {"array", "object"} & set(kinds):
                return f"({' | '.join(words.scalar(each) for each in given)})"
            return f"({' | '.join(words.term(kind) for kind in kinds)})"

        def item(key: str, inside: str) -> str:
            return f"{key} {_quoted(words.equals)} {inside}"

        return _in_order(schema, field, item, value, _quoted(words.comma))


class _Words(NamedTuple):
    """Spelling of values in calls like `f(a=1)`: `text` is the term of any text."""

    equals: str
    comma: str
    text: str
    quote: str
    true: str
    false: str

    def term(self, kind: str) -> str:
        """Any value of a JSON type."""
        terms = {
            "string": self.text,
            "boolean": f'"{self.true}" | "{self.false}"',
            "null": '"None"',
            "integer": "integer",
            "number": "number",
        }
        return terms.get(kind, "literal")

    def scalar(self, value: Any) -> str:
        """One value that is no list and no object."""
        if isinstance(value, bool):
            return _quoted(self.true if value else self.false)
        if not isinstance(value, str):
            return '"None"' if value is None else _quoted(json.dumps(value))
        if self.quote:
            return f"{self.quote} {_quoted(value)} {self.quote}"
        return f"{_quoted(_dump(value))} | {_quoted(repr(value))}"


def _in_order(
    schema: Mapping[str, Any],
    field: str,
    item: Callable[[str, str], str],
    value: Callable[[Any, Mapping[str, Any]], str],
    comma: str = "",
) -> str:
    """Arguments of a schema in its order, those that are not required at will."""
    allowed = _SILENT | _BESIDE
    _refuse_others(schema, allowed, field)
    properties = schema.get("properties", {})
    required = set(schema.get("required", ()))
    if missing := required - properties.keys():
        raise _not_held(f"required: {min(missing)}", field)
    items = [
        (item(_quoted(key), value(one if isinstance(one, dict) else {}, schema)), key in required)
        for key, one in properties.items()
    ]
    if not comma:
        return " ".join(text if needed else f"({text})?" for text, needed in items)
    # Required ones first: a comma stands before each but the first.
    items.sort(key=lambda one: not one[1])
    if not items:
        return ""
    if not items[0][1]:
        # At most the first that is there has no comma before it.
        tails = [
            text + "".join(f" ({comma} {other})?" for other, _ in items[number + 1 :])
            for number, (text, _) in enumerate(items)
        ]
        return f"({' | '.join(tails)})?"
    first = items[0][0]
    return first + "".join(
        f" {comma} {text}" if needed else f" ({comma} {text})?" for text, needed in items[1:]
    )


def _refuse_others(
    schema: Mapping[str, Any], allowed: frozenset[str] | set[str], field: str
) -> None:
    for word in schema:
        if word not in allowed:
            raise _not_held(word, field)


def _not_held(word: str, field: str) -> HearthError:
    return HearthError(
        "grammar_invalid", f"this model's form of calls cannot hold the keyword {word}", field
    )


def _letters(number: int) -> str:
    return "".join(chr(ord("a") + int(digit)) for digit in str(number))


def _safe(name: str) -> str:
    return "".join(chr(ord("a") + byte % 26) for byte in name.encode())


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _dump(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _pattern(text: str) -> str:
    """A regex of a text, for Rust's `regex` between slashes."""
    plain = re.sub(r"([\\.+*?()|\[\]{}^$#&~/-])", r"\\\1", text)
    return plain.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
