"""A conversation and the commands that steer it, apart from any terminal."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import inspect, structs

from hearth.daemon.cli.options import variable_value
from hearth.daemon.door.faults import describe
from hearth.daemon.shipped_files import shipped_picture
from hearth_client import Image, ToolCall
from hearth_client.errors import HearthClientError
from hearth_client.protocol import MAX_MESSAGES, Generate, Limits

Turn = dict[str, Any]
Action = Literal["say", "answer", "show", "refuse", "leave"]

HELP = """/system TEXT  set the system message and start again; - for none
/system       show it
/image PATH   show a picture with the next message; - for none
/set          show the options of requests; /set NAME VALUE sets one, - for none
/reset        forget the conversation
/reasoning    what the model thought before its last reply
/stats        what the last reply took
/help         this list
/exit         leave, as Ctrl-D does
Ctrl-C cancels a reply. Where the model calls a tool, the next line is the tool's result."""


_NO_PICTURES = (
    "this model takes no pictures: serve one that does, such as the one that ships with Hearth, by "
    "hearth export home-vision DIR and hearth serve --engine DIR"
)
_RESERVE = 16
"""One part in so many of a request's tokens is reserved for the next question and its reply."""


_SETTABLE = (
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "seed", "stop", "ignore_eos", "speculation"),
    *("adapter", "reasoning_budget"),
)
_TYPES = {field.name: field.type for field in structs.fields(Generate) if field.name in _SETTABLE}
_VARIABLE = "template."


class Conversation:
    """The turns so far; a system message, when there is one, comes first.

    Each question is followed by its reply, or by calls, their results and more of these up to it.
    `limits` are the daemon's; `stats` is shown by `/stats`, `reasoning` by `/reasoning`. `options`
    are those that the user sets. Results of the calls `pending` have to come before anything else
    is said. `form` is one that replies to this system message have.
    """

    def __init__(
        self,
        system: str | None = None,
        limits: Limits | None = None,
        options: Mapping[str, Any] | None = None,
        form: Mapping[str, Any] | None = None,
    ) -> None:
        self.limits = limits
        self.stats = "nothing has been answered yet"
        self.reasoning = ""
        self.options = dict(options or {})
        self.pending: list[ToolCall] = []
        self._system, self._form = system, form
        self._exchanges: list[list[Turn]] = []
        self._images: list[Image] = []
        self._tokens = 0

    @property
    def images(self) -> int:
        """Number of pictures that go with the next message, also where one has failed."""
        return len(self._images)

    @property
    def request(self) -> dict[str, Any]:
        """Options of the next request."""
        return {**self.options, "response_format": self._form} if self._form else self.options

    def messages(self, text: str | None) -> list[Turn]:
        """All turns with `text` as the user's next one, or with results of calls as the last."""
        first = [_turn("system", self._system)] if self._system else []
        asked = [] if text is None else [self._asked(text)]
        return [*first, *self._turns(), *asked]

    def add(
        self,
        text: str | None,
        reply: str,
        tokens: int = 0,
        reasoning: str = "",
        calls: Sequence[ToolCall] = (),
    ) -> None:
        """Remember what was said; a cancelled reply counts as far as it came.

        All of it together has `tokens`. Of a reply that has no text and no calls nothing is
        remembered: no daemon takes an empty turn.
        """
        self.reasoning, self.pending = reasoning, [*calls]
        if text is not None and (reply or calls):
            self._exchanges.append([self._asked(text)])
        if reply or calls:
            turn = _turn("assistant", reply)
            self._exchanges[-1].append(
                {**turn, "reasoning": reasoning, "tool_calls": [*calls]} if calls else turn
            )
            self._tokens = tokens
        self._images.clear()

    def answer(self, result: str) -> None:
        """Take the result of the first pending call."""
        call = self.pending.pop(0)
        self._exchanges[-1].append({**_turn("tool", result), "tool_call_id": call.id})

    @property
    def exchanges(self) -> list[list[Turn]]:
        """Turns so far by question, to be put back when a message turns out too long by itself."""
        return [[*turns] for turns in self._exchanges]

    @exchanges.setter
    def exchanges(self, exchanges: list[list[Turn]]) -> None:
        self._exchanges, self.pending = exchanges, []

    def forget_last(self) -> None:
        """Forget the last question, with the calls and results behind it."""
        self.exchanges = self._exchanges[:-1]

    def crowded(self) -> bool:
        """True if the oldest turns have to be dropped before another message can be answered."""
        if self.limits is None or not self._exchanges:
            return False
        asked, pictures = len(self._exchanges), [*_pictures(self._turns()), *self._images]
        return (
            len(self.messages("")) > MAX_MESSAGES
            or (asked > 1 and self._tokens * _RESERVE > self.limits.total_tokens * (_RESERVE - 1))
            or (len(pictures) > self.limits.images and len(pictures) > len(self._images))
            or sum(len(one.frame) for one in pictures) > self.limits.request_image_bytes > 0
        )

    def shorten(self) -> int:
        """Forget the oldest quarter of the questions and their replies; returns how many."""
        asked = len(self._exchanges) - self._open
        gone = min(asked, max(1, asked // 4))
        del self._exchanges[:gone]
        self._tokens = 0
        return gone

    def command(self, line: str) -> tuple[Action, str]:
        """Parse a line: text to send, a call's result, text to show, or a request to leave."""
        word, _, rest = line.strip().partition(" ")
        if not word.startswith("/"):
            return "answer" if self.pending else "say", line
        return self._steer(word, rest.strip())

    def _steer(self, word: str, rest: str) -> tuple[Action, str]:
        if word in {"/exit", "/quit"}:
            return "leave", ""
        if word == "/image":
            return self._show_image(rest)
        if word == "/set" and rest:
            return self._set(*rest.split(" ", 1))
        return "show", self._told(word, rest)

    def _told(self, word: str, rest: str) -> str:
        match word:
            case "/help" | "/stats":
                return HELP if word == "/help" else self.stats
            case "/reset":
                self.exchanges = []
                self._images.clear()
                return "the conversation is forgotten"
            case "/system":
                return self._set_system(rest)
            case "/set":
                return self._shown()
            case "/reasoning":
                return self.reasoning or "the last reply had no reasoning"
        return f"there is no command {word}: /help lists them"

    def _set_system(self, text: str) -> str:
        if text:
            self.exchanges = []
            self._system, self._form = None if text == "-" else text, None
            return "the system message is set" if self._system else "there is none now"
        return self._system or "there is no system message"

    @property
    def _open(self) -> bool:
        """True if the last question has results of calls and no reply yet."""
        return bool(self._exchanges) and self._exchanges[-1][-1]["role"] == "tool"

    def _turns(self) -> list[Turn]:
        return [turn for turns in self._exchanges for turn in turns]

    def _shown(self) -> str:
        given = [f"{name} {_text(value)}" for name, value in self._given()]
        return "\n".join(given or [f"none is set: there are {', '.join(_SETTABLE)}"])

    def _given(self) -> Iterator[tuple[str, Any]]:
        for name in _SETTABLE:
            if self.options.get(name) not in (None, ""):
                yield name, self.options[name]
        for name, value in self.options.get("template", {}).items():
            yield _VARIABLE + name, value

    def _set(self, name: str, text: str = "") -> tuple[Action, str]:
        text = text.strip()
        if name.startswith(_VARIABLE) and len(name) > len(_VARIABLE):
            return self._set_variable(name.removeprefix(_VARIABLE), text)
        if name not in _TYPES:
            return "refuse", f"there is no option {name}: there are {', '.join(_SETTABLE)}"
        if text == "-":
            self.options.pop(name, None)
            return "show", f"{name} is the model's own again"
        if not text:
            return "show", f"{name} {_text(self.options.get(name))}"
        given: Any = [text] if name == "stop" else text
        try:
            self.options[name] = msgspec.convert(given, _TYPES[name], strict=False)
        except msgspec.ValidationError:
            wanted = describe(inspect.type_info(_TYPES[name]))
            return "refuse", f"{name} must be {wanted}"
        return "show", f"{name} {_text(self.options[name])}"

    def _set_variable(self, name: str, text: str) -> tuple[Action, str]:
        variables = {**self.options.get("template", {})}
        if text == "-":
            variables.pop(name, None)
        elif text:
            variables[name] = variable_value(text)
        self.options["template"] = variables
        return "show", f"template.{name} {_text(variables.get(name))}"

    def _asked(self, text: str) -> Turn:
        return {"role": "user", "content": [*self._images, text] if self._images else text}

    def _show_image(self, path: str) -> tuple[Action, str]:
        if path == "-":
            self._images.clear()
        elif self.limits is not None and not self.limits.images:
            return "refuse", _NO_PICTURES
        elif path:
            try:
                self._images.append(Image(_path_of(path)))
            except OSError as error:
                return "refuse", f"{path} cannot be read: {error.strerror}"
            except HearthClientError as error:
                return "refuse", f"{path}: {error.message}"
        return "show", f"pictures for the next message: {self.images}"


def _path_of(text: str) -> Path:
    """The file that is meant: a terminal quotes the name of one that is dropped on it."""
    path = Path(text).expanduser()
    if not path.exists():
        with suppress(ValueError):
            words = shlex.split(text)
            path = Path(words[0]).expanduser() if len(words) == 1 else path
    return shipped_picture(path)


def _pictures(turns: list[Turn]) -> list[Image]:
    return [
        part
        for turn in turns
        if isinstance(turn["content"], list)
        for part in turn["content"]
        if isinstance(part, Image)
    ]


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _turn(role: str, content: str) -> Turn:
    return {"role": role, "content": content}
