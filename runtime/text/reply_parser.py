"""A reply as text on its way to text, reasoning and calls."""

import json
import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from hearth.runtime.text.conversation import Tool
from hearth.runtime.text.reply_format import CallForm, ReplyFormat
from hearth.runtime.text.reply_scanner import (
    Mark,
    NotThereError,
    Reading,
    Scanner,
    first_of,
    skip_space,
)

# Letters and digits, as many as templates of Mistral ask for; the others take any.
_ID_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_ID_LENGTH = 9
_LONGEST_NAME = 256
_STAND_IN = re.compile("[\ud800-\udfff]")
_CDATA = re.compile(r"<!\[CDATA\[(.*)\]\]>", re.DOTALL)


class CallPiece(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A piece of the call `index` of a reply.

    The first piece has `id` and `name`, all of them the next characters of the arguments' JSON
    text, and `complete` is True in the last piece of a call that came to its end.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    complete: bool = False


class ReplyPieces(msgspec.Struct, array_like=True, omit_defaults=True):
    """Pieces of a reply that can be released now, perhaps none."""

    text: str = ""
    reasoning: str = ""
    calls: list[CallPiece] = []


class ReplyParser(Scanner):
    """A reply as text, taken apart as `ReplyReader` does it with token ids.

    Special tokens of its format are stand-ins in the text: characters with their spellings in
    `shown`.
    """

    def __init__(
        self,
        shape: ReplyFormat,
        shown: dict[str, str],
        tools: Sequence[Tool],
        *,
        in_reasoning: bool,
    ) -> None:
        super().__init__()
        self._shown = shown
        self._tools = {tool.name: tool for tool in tools}
        self._found = ReplyPieces()
        # Text from here on was neither released nor belongs to a mark or a call.
        self._kept = 0
        self._streaming = False
        self.reasons = False
        """True while reasoning is read, its opening mark behind and its closing mark to come."""
        self._heads = self._calls = 0
        self._marks: dict[str, Mark] = {}
        self._reasoning = [self._mark(one) for one in shape.reasoning]
        channels = shape.calls is not None and shape.calls.kind == "channels"
        self._channels = shape.calls if channels else None
        self._form = shape.calls if tools and not channels else None
        self._reading: Reading[None] | None = self._reply(in_reasoning=in_reasoning)

    def feed(self, text: str, *, ended: bool = False) -> ReplyPieces:
        """Add text; returns what it releases."""
        # Appended in place, as nothing else holds it: a copy for each token would be quadratic.
        grown, self.text = self.text, ""
        grown += text
        self.text = grown
        self.ended = self.ended or ended
        self._found = ReplyPieces()
        while self._reading is not None:
            try:
                next(self._reading)
            except StopIteration:
                self._reading = None
            if not self.ended:
                break
        return self._found

    def more(self) -> Reading[None]:
        """Release the arguments so far, and wait for more text."""
        self._stream()
        yield from super().more()

    def _mark(self, spelling: str) -> Mark:
        """The mark of a spelling, stand-ins for special tokens in it."""
        if spelling not in self._marks:
            text = spelling
            for stand_in, name in sorted(self._shown.items(), key=lambda one: -len(one[1])):
                text = text.replace(name, stand_in)
            self._marks[spelling] = Mark(text)
        return self._marks[spelling]

    def _reply(self, *, in_reasoning: bool) -> Reading[None]:
        opened, closed = self._reasoning
        if self._channels is not None:
            yield from self._try(self._messages(self._channels))
        elif in_reasoning and closed:
            yield from self._body([closed], reasoning=True)
        elif opened:
            yield from self._try(self._open_reasoning(opened, closed))
        if self._form is not None and not self._open_calls():
            yield from self._try(self._section(self._form))
        yield from self._answer()

    def _open_calls(self) -> Mark:
        form = self._form
        return self._mark("" if form is None else form.section[0] + form.call[0])

    def _open_reasoning(self, opened: Mark, closed: Mark) -> Reading[None]:
        yield from self.expect(opened)
        yield from self._body([closed], reasoning=True)

    def _messages(self, form: CallForm) -> Reading[None]:
        """Read messages of channels: a head that says for whom it is, and a body."""
        ends = [self._mark(one) for one in (form.section[1], form.call[1], form.section[0])]
        while (yield from self._next()):
            head = self._reveal((yield from self.until(self._mark(form.head_close))))
            called = re.search(re.escape(form.call[0]) + r"([A-Za-z0-9_.:/-]+)", head)
            if called is None:
                yield from self._body(ends, reasoning=form.key_open in head)
                continue
            self._begin(called[1])
            yield from self._object()
            self._complete()
            if (yield from self._next()):
                yield from self.sees(ends[1])
            self._kept = self.at

    def _try(self, reading: Reading[None]) -> Reading[None]:
        """Run a reader; where it fails go back to what is not released."""
        try:
            yield from reading
        except NotThereError:
            self._streaming = False
            self.at = self._kept

    def _body(self, ends: Sequence[Mark], *, reasoning: bool) -> Reading[None]:
        """Release reasoning or text up to a mark that ends it, without white space around it."""
        self._kept = self.at
        self.reasons, began = reasoning, False
        while True:
            found = first_of(ends, self.text, self.at)
            text = self.text[self._kept : found.start]
            body = text if found.mark is None and self.ended else text.rstrip()
            self._kept += len(body)
            shown = self._reveal(body if began else body.lstrip())
            began = began or bool(shown)
            if reasoning:
                self._found.reasoning += shown
            else:
                self._found.text += shown
            self.at = found.start
            if found.mark is not None:
                self.at, self.reasons = found.end, False
                yield from self.space()
                self._kept = self.at
                return
            if self.ended:
                return
            yield from self.more()

    def _answer(self) -> Reading[None]:
        """Release text, and calls within it, up to the end of the reply."""
        form, opens = self._form, self._open_calls()
        marks = [opens] if opens else []
        while True:
            found = first_of(marks, self.text, self.at)
            if found.mark is not None or not self.ended:
                text = self.text[self._kept : found.start]
                # White space goes with the mark that may follow.
                self._say(len(text.rstrip()) if marks else len(text))
            if found.mark is not None and form is not None:
                start = self._kept
                self.at = found.end
                yield from self._try(self._section(form))
                # Where nothing was read the mark is text: look behind it.
                self.at = max(self.at, found.start + 1 if self._kept == start else self._kept)
                continue
            if self.ended:
                rest = self.text[self._kept :]
                self._say(0 if self._calls and not rest.strip() else len(rest))
                return
            self.at = found.start
            yield from self.more()

    def _say(self, count: int) -> None:
        self._found.text += self._reveal(self.text[self._kept : self._kept + count])
        self._kept += count

    def _reveal(self, text: str) -> str:
        return _STAND_IN.sub(lambda match: self._shown.get(match[0], ""), text)

    def _reveal_json(self, text: str) -> str:
        return _STAND_IN.sub(lambda match: json.dumps(self._reveal(match[0]))[1:-1], text)

    def _section(self, form: CallForm) -> Reading[None]:
        """Read calls that lie side by side; the marks before the first one are passed."""
        close = self._mark(form.section[1])
        again = self._mark(form.call[0])
        readers = {
            "json": self._json_call,
            "named": self._named_call,
            "tagged": self._tagged_call,
            "python": self._python_call,
            "bare": self._bare_call,
        }
        while True:
            yield from readers[form.kind](form)
            yield from self._close(self._mark(form.call[1]))
            self._complete()
            if form.separator.strip() and (yield from self.sees(self._mark(form.separator))):
                self._kept = self.at
            if close and (yield from self.sees(close, cut=True)):
                self._kept = self.at
                return
            if again:
                if not (yield from self.sees(again)):
                    break
            elif not (yield from self._goes_on(form)):
                break
        self.at = self._kept

    def _complete(self) -> None:
        self._found.calls.append(CallPiece(self._heads - 1, complete=True))
        self._calls += 1
        self._kept = self.at

    def _goes_on(self, form: CallForm) -> Reading[bool]:
        """True if a call that no mark opens may come next."""
        first = yield from self._next()
        return first == "{" if form.kind == "json" else first.isalpha()

    def _close(self, mark: Mark) -> Reading[None]:
        """Pass the end of a call, which is the end of the reply where a model leaves it out."""
        if mark and (yield from self._next()) and not (yield from self.sees(mark, cut=True)):
            raise NotThereError

    def _next(self) -> Reading[str]:
        yield from self.space()
        return (yield from self.peek())

    def _begin(self, name: str, call_id: str = "") -> None:
        """Release the head of a call; raises where no tool has its name."""
        if name not in self._tools:
            raise NotThereError
        call_id = call_id or "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))
        # One that breaks off keeps its number: pieces of the next one are not joined to it.
        self._found.calls.append(CallPiece(self._heads, call_id, name))
        self._heads += 1

    def _give(self, arguments: str) -> None:
        """Release a piece of the arguments' text; all text so far belongs to it."""
        self._found.calls.append(CallPiece(self._heads - 1, arguments=arguments))
        self._kept = self.at

    def _stream(self) -> None:
        if self._streaming and self.at > self._kept:
            text = self.text[self._kept : self.at]
            self._give(self._reveal_json(text))

    def _object(self) -> Reading[None]:
        """Read arguments, a JSON object, and release them as they come."""
        if (yield from self._next()) != "{":
            raise NotThereError
        self._kept = self.at
        self._streaming = True
        yield from self.json()
        self._stream()
        self._streaming = False

    def _json_call(self, form: CallForm) -> Reading[None]:
        yield from self.space()
        yield from self.need("{")
        name, call_id, arguments, begun = "", "", "{}", False
        while True:
            yield from self.space()
            key = json.loads((yield from self.json()))
            yield from self.space()
            yield from self.need(":")
            if not form.name_key:
                self._begin(key if isinstance(key, str) else "")
                yield from self._object()
                begun = True
            elif key == form.arguments_key and name and (yield from self._next()) == "{":
                self._begin(name, call_id)
                yield from self._object()
                begun = True
            else:
                text = yield from self.json()
                if key == form.arguments_key:
                    arguments = _as_object(text)
                elif key in {form.name_key, form.id_key}:
                    value = json.loads(text)
                    if not isinstance(value, str):
                        raise NotThereError
                    name, call_id = (value, call_id) if key == form.name_key else (name, value)
            yield from self.space()
            if (yield from self.took("}")):
                break
            yield from self.need(",")
        if not begun:
            self._begin(name, call_id)
            self._give(self._reveal_json(arguments))

    def _head(self, form: CallForm) -> Reading[tuple[str, str]]:
        """Name and id of a call."""
        call_id = ""
        if form.id_place == "before":
            call_id = yield from self.until(self._mark(form.id_close), _LONGEST_NAME)
        if form.name_close.strip():
            name = yield from self.until(self._mark(form.name_close), _LONGEST_NAME)
        else:
            yield from self.space()
            name = yield from self.word()
        if form.head_close:
            rest = yield from self.until(self._mark(form.head_close), _LONGEST_NAME)
            call_id = rest if form.id_place == "after" else call_id
        return name.strip(), call_id.strip()

    def _named_call(self, form: CallForm) -> Reading[None]:
        self._begin(*(yield from self._head(form)))
        yield from self._object()

    def _tagged_call(self, form: CallForm) -> Reading[None]:
        name, call_id = yield from self._head(form)
        opens, close = self._mark(form.key_open), self._mark(form.call[1])
        given = False
        while (yield from self.sees(opens)):
            key = yield from self.until(self._mark(form.key_close), _LONGEST_NAME)
            kind = ""
            if form.value_open:
                kind = yield from self.until(self._mark(form.value_open), _LONGEST_NAME)
            raw = yield from self.until(self._mark(form.value_close))
            raw = raw.removeprefix(_space_after(form)).removesuffix(_space_before(form))
            if not given:
                self._begin(name, call_id)
            tool = self._tools[name]
            value = typed_json(self._reveal(raw), tool.parameters, self._reveal(key), kind)
            key = json.dumps(self._reveal(key), ensure_ascii=False)
            self._give(f"{', ' if given else '{'}{key}: {value}")
            given = True
        if (yield from self._next()):
            at = self.at
            if not (yield from self.sees(close, cut=True)):
                raise NotThereError
            self.at = at
        if not given:
            self._begin(name, call_id)
        self._give("}" if given else "{}")

    def _python_call(self, _: CallForm) -> Reading[None]:
        yield from self.space()
        name = yield from self.word()
        yield from self.need("(")
        arguments = yield from self.named_values(")")
        self._begin(name)
        self._give(self._reveal_json(json.dumps(arguments, ensure_ascii=False)))

    def _bare_call(self, form: CallForm) -> Reading[None]:
        name, call_id = yield from self._head(form)
        if (yield from self._next()) != "{":
            raise NotThereError
        arguments = yield from self.literal(self._mark(form.quote))
        self._begin(name, call_id)
        self._give(self._reveal_json(json.dumps(arguments, ensure_ascii=False)))


def _space_after(form: CallForm) -> str:
    spelling = form.value_open or form.key_close
    return spelling[len(spelling.rstrip()) :]


def _space_before(form: CallForm) -> str:
    return form.value_close[: len(form.value_close) - len(form.value_close.lstrip())]


def _as_object(text: str) -> str:
    """The text of arguments that are an object, or the text of one as models repeat it."""
    for _ in range(2):
        if text.startswith("{"):
            return text
        value = json.loads(text)
        if not isinstance(value, str):
            raise NotThereError
        text = _whole(value.strip(), lambda scanner: scanner.json())
    raise NotThereError


def _whole(text: str, read: Callable[[Scanner], Reading[Any]]) -> Any:
    """Run a reader on a text, all of which it has to read."""
    scanner = Scanner(text, ended=True)
    found = scanner.run(read(scanner))
    if skip_space(text, scanner.at) < len(text):
        raise NotThereError
    return found


def typed_json(raw: str, parameters: dict[str, Any], key: str, kind: str = "") -> str:
    """JSON text of an argument that stands between marks, by the tool's schema.

    `kind` is what the mark says of its type. Text without a type in the schema is a number, a
    constant, a list or an object where it can be.
    """
    if (inside := _CDATA.fullmatch(raw.strip())) is not None:
        return json.dumps(inside[1], ensure_ascii=False)
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, dict) else None
    kinds = types_of(schema, parameters)
    if kinds == {"string"} or 'string="true"' in kind or 'type="string"' in kind:
        return json.dumps(raw, ensure_ascii=False)
    for read in (_as_json, _as_literal):
        found = read(raw.strip())
        # Text in quotes is that: it would stand there without them.
        if found[:1] not in {"", '"'} and (kinds is None or _kind_of(found) & kinds):
            return found
    return json.dumps(raw, ensure_ascii=False)


def _as_json(raw: str) -> str:
    try:
        return cast("str", _whole(raw, lambda scanner: scanner.json()))
    except NotThereError:
        return ""


def _as_literal(raw: str) -> str:
    try:
        return json.dumps(_whole(raw, lambda scanner: scanner.literal()), ensure_ascii=False)
    except NotThereError:
        return ""


_FIRST = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}


def _kind_of(text: str) -> set[str]:
    """The types that the text of a JSON value has."""
    if text[0] in _FIRST:
        return {_FIRST[text[0]]}
    whole = text.lstrip("-").isdigit() or float(text).is_integer()
    return {"number", "integer"} if whole else {"number"}


_DEEPEST_REFERENCE = 8


def types_of(schema: Any, root: dict[str, Any], depth: int = 0) -> set[str] | None:
    """The JSON types that a schema allows; None where it does not say."""
    if not isinstance(schema, dict) or depth > _DEEPEST_REFERENCE:
        return None
    named = schema.get("type")
    if isinstance(named, str | list) and named:
        return {named} if isinstance(named, str) else {one for one in named if isinstance(one, str)}
    if isinstance(reference := schema.get("$ref"), str):
        return types_of(_behind(reference, root), root, depth + 1)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        return set().union(*(_kind_of(json.dumps(one)) for one in values))
    others = next((schema[word] for word in ("anyOf", "oneOf", "allOf") if word in schema), None)
    found = [types_of(one, root, depth + 1) for one in others] if isinstance(others, list) else []
    known = [one for one in found if one is not None]
    if not known or ("allOf" not in schema and len(known) < len(found)):
        return None
    return known[0] if "allOf" in schema else set().union(*known)


def _behind(reference: str, root: dict[str, Any]) -> Any:
    found: Any = root
    for step in reference.removeprefix("#").strip("/").split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, dict) else None
    return found
