"""The form of a model's calls, found out by rendering some with its chat template."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from msgspec import structs

from hearth.runtime.errors import HearthError
from hearth.runtime.text.chat_template import ChatTemplate, tool_map
from hearth.runtime.text.conversation import Tool
from hearth.runtime.text.reply_format import (
    OWN_CALLS,
    CallForm,
    ReplyFormat,
    format_by_name,
    format_by_trait,
)
from hearth.runtime.text.reply_parser import ReplyParser
from hearth.runtime.text.response_template import read_response_template

T = TypeVar("T")
Call = tuple[str, dict[str, Any]]
_ASKED, _SAID, _THOUGHT = "kwq7asked", "kwq7said", "kwq7thought"
_NAMES = ("kwq7first", "kwq7second")
_KEYS = ("kwq7one", "kwq7two")
_VALUES = (7048151, 7062342)
_IDS = ("c7q8w9x1y", "d7q8w9x2z")
_MARKUP = r"(?:<[^<>\s]+>|\[[^\[\]\s]+\])"
_PIECE = re.compile(rf"{_MARKUP}|\s+|.", re.DOTALL)
_OPENED = re.compile(rf"({_MARKUP}(?:\w+{_MARKUP})*(?:\w+\n)?)\s*$")
# Marks of reasoning of templates that write none themselves, by their text.
_REASONING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
)
_PARAMETERS = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "on": {"type": "boolean"},
        "list": {"type": "array"},
        "map": {"type": "object"},
        _KEYS[0]: {"type": "integer"},
        _KEYS[1]: {"type": "integer"},
    },
    "required": ["text"],
}
_TOOLS = [Tool(name, "Does it.", _PARAMETERS) for name in _NAMES]
_PROOFS: Sequence[Sequence[Call]] = (
    [(_NAMES[0], {"text": "a {b}, c: [d] ü", "count": 12})],
    [(_NAMES[1], {"map": {"x": [1, "y z"], "w": {"v": 2}}, "on": True, "text": "12"})],
    [(_NAMES[0], {"text": "true", "list": ["p", 3], "share": 0.5}), (_NAMES[1], {"text": "q"})],
)


class ReplyProbe:
    """Renders replies with a chat template; `ends` are the spellings of a model's end tokens."""

    def __init__(self, template: ChatTemplate, ends: Sequence[str]) -> None:
        self._template = template
        self._ends = [end for end in ends if end]
        self._tools = [tool_map(one.name, one.description, one.parameters) for one in _TOOLS]

    @cached_property
    def reasoning(self) -> tuple[str, str]:
        """The marks around reasoning; empty if the template has none."""
        key = self._template.reasoning_key
        plain = self._render({"content": _SAID}).partition(_SAID)[0]
        turn = {"content": _SAID, key: _THOUGHT}
        for extra in ({}, {"tool_calls": _calls([(_NAMES[0], {})], as_text=False)}) if key else ():
            before, shown, after = self._render({**turn, **extra}).partition(_THOUGHT)
            # The turn's own mark stands before it, unless the template reasons in every turn.
            own = before[len(_common_start(plain, before)) :]
            opened = _OPENED.search(own) or _OPENED.search(before)
            after = after.partition(_SAID)[0]
            closed = re.match(rf"\s*({_MARKUP}(?:\w+{_MARKUP})*)", after)
            if shown and opened and closed and not plain.rstrip().endswith(opened[1]):
                return opened[1], closed[1]
        source = self._template.source
        return next((one for one in _REASONING if all(mark in source for mark in one)), ("", ""))

    @cached_property
    def shows_tools(self) -> bool:
        """True if the template tells the model of its tools."""
        return _NAMES[0] in self._render({"content": _SAID})

    @cached_property
    def shows_calls(self) -> bool:
        """True if the template renders the calls of a turn."""
        text = self._reply([(_NAMES[0], {"text": "q"})], ("", ""))
        return text is not None and _NAMES[0] in text

    @cached_property
    def shows_results(self) -> bool:
        """True if the template renders results of tools."""
        calls = _calls([(_NAMES[0], {"text": "q"})], as_text=self._template.takes_argument_text)
        result = {"role": "tool", "tool_call_id": _IDS[0], "name": _NAMES[0], "content": _SAID}
        return _SAID in self._render({"content": "", "tool_calls": calls}, result)

    @cached_property
    def shows_system(self) -> bool:
        """True if the template takes a system turn."""
        turns = [{"role": "system", "content": _SAID}, {"role": "user", "content": _ASKED}]
        return any(_SAID in self._rendered(turns, tools) for tools in ([], self._tools))

    def find(self, setting: str = "", response_template: Any = None) -> ReplyFormat:
        """The format of the model's replies, from the first source that tells one.

        These are `setting`, the name of a known format, the model's response template, a known
        template, and forms that rendered calls prove; else the form is Hearth's own. Raises
        `invalid_value` for a setting that names no format.
        """
        if setting:
            return format_by_name(setting)
        told = read_response_template(response_template)
        if told is not None:
            return told
        reasoning = self.reasoning
        known = format_by_trait(self._template.source)
        if known is not None:
            return structs.replace(known, reasoning=reasoning)
        calls = self.calls()
        if calls is not None:
            return ReplyFormat(calls.kind, "probe", reasoning, calls)
        return ReplyFormat("hearth", "own", reasoning, OWN_CALLS)

    def calls(self) -> CallForm | None:
        """The form of calls, if it is one of those that can be told and proves right."""
        reasoning = self.reasoning
        forms = (_form(one) for one in self._samples(reasoning))
        return next(
            (
                form
                for form in forms
                if form and self.proves(ReplyFormat("", "probe", reasoning, form))
            ),
            None,
        )

    def proves(self, found: ReplyFormat) -> bool:
        """True if three replies with calls are read back exactly, a character at a time."""
        return all(self._proves(found, calls) for calls in _PROOFS)

    def _proves(self, found: ReplyFormat, calls: Sequence[Call]) -> bool:
        text = self._reply(calls, found.reasoning)
        # Some templates take one call a turn: they refuse more, or leave them out.
        if len(calls) > 1 and (text is None or calls[-1][0] not in text):
            return self._proves(found, calls[:1])
        return text is not None and _read(text, found) == list(calls)

    def _samples(self, reasoning: tuple[str, str]) -> Iterator["_Sample"]:
        arguments = dict(zip(_KEYS, _VALUES, strict=True))
        for count in (2, 1):
            calls = [(name, arguments) for name in _NAMES[:count]]
            text = self._reply(calls, reasoning)
            if text is not None and all(name in text for name in _NAMES[:count]):
                words = self._reply([(_NAMES[0], {_KEYS[0]: "a", _KEYS[1]: "b"})], reasoning)
                yield _Sample(text, count, words or "")

    def _reply(self, calls: Sequence[Call], reasoning: tuple[str, str]) -> str | None:
        """A reply with calls alone, without the end of its turn; None if it is not rendered."""
        found = _calls(calls, as_text=self._template.takes_argument_text)
        said = self._render({"content": _SAID})
        text = self._render({"content": "", "tool_calls": found})
        if _SAID not in said or not text:
            return None
        start = len(_common_start(said[: said.index(_SAID)], text))
        start = max(start, text.find(_ASKED) + len(_ASKED))
        end = len(_common_end(said, text))
        reply = text[start : len(text) - end if end else None]
        cuts = [at for at in map(reply.find, self._ends) if at >= 0]
        reply = reply[: min(cuts, default=len(reply))]
        return _without_reasoning(reply, reasoning)

    def _render(self, turn: Mapping[str, Any], *others: Mapping[str, Any]) -> str:
        asked = {"role": "user", "content": _ASKED}
        return self._rendered([asked, {"role": "assistant", **turn}, *others], self._tools)

    def _rendered(self, turns: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> str:
        try:
            return self._template.render(turns, tools, prompt=False)
        except HearthError:
            return ""


def _calls(calls: Sequence[Call], *, as_text: bool) -> list[dict[str, Any]]:
    found = []
    for call_id, (name, given) in zip(_IDS, calls, strict=False):
        arguments = json.dumps(given, ensure_ascii=False) if as_text else given
        function = {"name": name, "arguments": arguments}
        found.append({"id": call_id, "type": "function", "function": function})
    return found


class _Sample(NamedTuple):
    """A reply of `calls` calls with numbers, and one of a call with words."""

    text: str
    calls: int
    words: str


def _without_reasoning(reply: str, reasoning: tuple[str, str]) -> str:
    opened, closed = reasoning
    if closed and closed in reply and not reply.partition(closed)[0].replace(opened, "").strip():
        return reply.partition(closed)[2].lstrip()
    return reply.lstrip()


def _read(text: str, found: ReplyFormat) -> list[Call] | None:
    parser = ReplyParser(found, {}, _TOOLS, in_reasoning=False)
    pieces = [parser.feed(character) for character in text]
    pieces.append(parser.feed("", ended=True))
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for piece in (call for one in pieces for call in one.calls):
        names.setdefault(piece.index, piece.name)
        arguments[piece.index] = arguments.get(piece.index, "") + piece.arguments
    if any(one.text.strip() or one.reasoning for one in pieces):
        return None
    try:
        return [(names[index], json.loads(arguments[index])) for index in sorted(names)]
    except ValueError:
        return None


def _form(sample: _Sample) -> CallForm | None:
    return _json_form(sample) or _named_form(sample) or _tagged_form(sample) or _short_form(sample)


def _enclosed(sample: _Sample, spans: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """The marks around calls whose own text is at `spans`."""
    text, (start, end) = sample.text, spans[0]
    if len(spans) == 1:
        return {"call": (text[:start].lstrip(), text[end:].rstrip())}
    opened, between, closed = text[:start], text[end : spans[1][0]], text[spans[1][1] :]
    call_open = _common_end(opened, between)
    call_close = _common_start(between[: len(between) - len(call_open)], closed)
    return {
        "section": (opened[: len(opened) - len(call_open)], closed[len(call_close) :]),
        "call": (call_open, call_close),
        "separator": between[len(call_close) : len(between) - len(call_open)],
    }


def _json_form(sample: _Sample) -> CallForm | None:
    """The form where each call is one JSON object."""
    spans, keys = [], dict[str, str]()
    for name in _NAMES[: sample.calls]:
        place = sample.text.index(name)
        for at in (m.start() for m in re.finditer(r"\{", sample.text[:place])):
            try:
                value, end = json.JSONDecoder().raw_decode(sample.text, at)
            except ValueError:
                continue
            found = _keys_of(value, name)
            if end > place and found is not None:
                keys, place = found, -1
                spans.append((at, end))
                break
        if place >= 0:
            return None
    return structs.replace(CallForm("json", **_enclosed(sample, spans)), **keys)


def _keys_of(value: dict[str, Any], name: str) -> dict[str, str] | None:
    arguments = dict(zip(_KEYS, _VALUES, strict=True))
    if value.get(name) == arguments:
        return {"name_key": "", "arguments_key": ""}
    named = next((key for key, one in value.items() if one == name), None)
    given = (arguments, json.dumps(arguments))
    argued = next((key for key, one in value.items() if one in given), None)
    if named is None or argued is None:
        return None
    identified = next((key for key, one in value.items() if one in _IDS), "")
    return {"name_key": named, "arguments_key": argued, "id_key": identified}


def _named_form(sample: _Sample) -> CallForm | None:
    """The form where JSON arguments follow a name."""
    spans: list[tuple[int, int]] = []
    heads = []
    for name, call_id in zip(_NAMES[: sample.calls], _IDS, strict=False):
        at = sample.text.index(name) + len(name)
        start = sample.text.find("{", at)
        try:
            value, end = json.JSONDecoder().raw_decode(sample.text, max(start, 0))
        except ValueError:
            return None
        if start < 0 or value != dict(zip(_KEYS, _VALUES, strict=True)):
            return None
        before = sample.text.rfind(call_id, 0, at)
        begin = before if before > (spans[-1][1] if spans else 0) else at - len(name)
        spans.append((begin, end))
        heads.append((sample.text[begin : at - len(name)], sample.text[at:start], call_id))
    return _with_heads(CallForm("named", **_enclosed(sample, spans)), heads)


def _with_heads(form: CallForm, heads: Sequence[tuple[str, str, str]]) -> CallForm:
    """A form with what lies before and behind the names of calls with these ids."""
    (before, behind, call_id), *others = heads
    if before:
        form = structs.replace(form, id_place="before", id_close=before.removeprefix(call_id))
    if call_id in behind:
        closes = behind.split(call_id, 1)
        place: Any = {"id_place": "after"}
    elif others and others[0][1] != behind:
        start = _common_start(behind, others[0][1])
        closes = [start, _common_end(behind[len(start) :], others[0][1][len(start) :])]
        place = {}
    else:
        return structs.replace(form, name_close=behind)
    return structs.replace(form, name_close=closes[0], head_close=closes[1], **place)


def _tagged_form(sample: _Sample) -> CallForm | None:
    """The form where each argument lies between marks."""
    shape = r"(.*?)".join(
        re.escape(one) for one in (_KEYS[0], str(_VALUES[0]), _KEYS[1], str(_VALUES[1]))
    )
    found = re.search(f"{_NAMES[0]}(.*?){shape}(.*)", sample.text, re.DOTALL)
    if found is None:
        return None
    head, key_close, between, again, rest = found.groups()
    if again != key_close:
        return None
    key_open = _common_end(head, between)
    value_close = _common_start(between[: len(between) - len(key_open)], rest).rstrip()
    if not key_open or not value_close:
        return None
    spans = []
    for name in _NAMES[: sample.calls]:
        start = sample.text.index(name)
        last = sample.text.index(str(_VALUES[1]), start) + len(str(_VALUES[1]))
        spans.append((start, last + len(value_close)))
    name_close = head[: len(head) - len(key_open)]
    heads = [("", name_close, "\0")]
    if sample.calls > 1:
        at = sample.text.rindex(_NAMES[1]) + len(_NAMES[1])
        other = sample.text[at : sample.text.index(_KEYS[0], at)]
        heads.append(("", other[: len(other) - len(key_open)], "\0"))
    form = CallForm(
        "tagged",
        **_enclosed(sample, spans),
        key_open=key_open,
        key_close=key_close,
        value_close=value_close,
    )
    return _with_types(_with_heads(form, heads), sample.words)


def _short_form(sample: _Sample) -> CallForm | None:
    """The form of calls as Python has them, or with keys that no quotes enclose."""
    (one, two), (first, second) = _KEYS, _VALUES
    shapes = {
        "python": rf"\({one}=\s*{first},\s*{two}=\s*{second}\)",
        "bare": rf"\{{{one}:\s*{first},\s*{two}:\s*{second}\}}",
    }
    for kind, shape in shapes.items():
        spans = [m.span() for m in re.finditer(rf"(?:{'|'.join(_NAMES)}){shape}", sample.text)]
        if len(spans) != sample.calls:
            continue
        marks = _enclosed(sample, spans)
        if kind == "python":
            return CallForm("python", **marks)
        quote = re.search(rf"{one}:(.+?)a\1", sample.words)
        return CallForm("bare", **marks, quote=quote[1] if quote else '"')
    return None


def _with_types(form: CallForm, words: str) -> CallForm:
    """A form whose marks before values tell their type, where those before words differ."""
    found = re.search(rf"{_KEYS[0]}(.*?)a{re.escape(form.value_close)}", words, re.DOTALL)
    if found is None or found[1].startswith(form.key_close):
        return form
    quote = form.key_close[:1]
    end = form.key_close.rfind(quote) + 1
    return structs.replace(form, key_close=quote, value_open=form.key_close[end:])


def _common_start(first: str, second: str) -> str:
    """The marks and characters with which both begin."""
    return "".join(_common(_PIECE.findall(first), _PIECE.findall(second)))


def _common_end(first: str, second: str) -> str:
    pieces = _common(_PIECE.findall(first)[::-1], _PIECE.findall(second)[::-1])
    return "".join(pieces[::-1])


def _common(first: Sequence[T], second: Sequence[T]) -> Sequence[T]:
    """The items with which both begin."""
    pairs = enumerate(zip(first, second, strict=False))
    return first[
        : next((at for at, (one, two) in pairs if one != two), min(len(first), len(second)))
    ]
