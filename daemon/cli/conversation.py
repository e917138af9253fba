"""A conversation and the commands that steer it, apart from any terminal."""

import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from hearth_client import HearthClientError, Image
from hearth_client.protocol import MAX_MESSAGES, Limits

from daemon.shipped_files import shipped_picture

Turn = dict[str, Any]
Action = Literal["say", "show", "refuse", "leave"]

HELP = """/system TEXT  set the system message and start again; - for none
/system       show it
/image PATH   show a picture with the next message; - for none
/reset        forget the conversation
/stats        what the last reply took
/help         this list
/exit         leave, as Ctrl-D does
Ctrl-C cancels a reply."""


_NO_PICTURES = (
    "this model takes no pictures: serve one that does, such as the one that ships with Hearth, by "
    "hearth export home-vision DIR and hearth serve --engine DIR"
)
_ROOM = 16
"""Of what a request may hold one part in so many is for the next question and its reply."""


class Conversation:
    """The turns so far; a system message, when there is one, comes first.

    Questions and replies alternate. `limits` are the daemon's; `stats` is told by `/stats`.
    """

    def __init__(self, system: str | None = None, limits: Limits | None = None) -> None:
        self.limits = limits
        self.stats = "nothing has been answered yet"
        self._system = system
        self._turns: list[Turn] = []
        self._images: list[Image] = []
        self._tokens = 0

    @property
    def images(self) -> int:
        """How many pictures go with the next message, also where one has failed."""
        return len(self._images)

    def messages(self, text: str) -> list[Turn]:
        """All turns with `text` as the user's next one."""
        first = [_turn("system", self._system)] if self._system else []
        return [*first, *self._turns, self._asked(text)]

    def add(self, text: str, reply: str, tokens: int = 0) -> None:
        """Remember what was said; a cancelled reply counts as far as it came.

        All of it together has `tokens`. Of a reply that has no text nothing is remembered: no
        daemon takes an empty turn.
        """
        if reply:
            self._turns += [self._asked(text), _turn("assistant", reply)]
            self._tokens = tokens
        self._images.clear()

    @property
    def turns(self) -> list[Turn]:
        """What was said, to be put back when a message turns out too long by itself."""
        return [*self._turns]

    @turns.setter
    def turns(self, turns: list[Turn]) -> None:
        self._turns = turns

    def crowded(self) -> bool:
        """Whether the oldest turns have to leave before another message is taken and answered."""
        if self.limits is None or not self._turns:
            return False
        asked, pictures = len(self._turns) // 2, [*_pictures(self._turns), *self._images]
        return (
            len(self.messages("")) > MAX_MESSAGES
            or (asked > 1 and self._tokens * _ROOM > self.limits.total_tokens * (_ROOM - 1))
            or (len(pictures) > self.limits.images and len(pictures) > len(self._images))
            or sum(len(one.frame) for one in pictures) > self.limits.request_image_bytes > 0
        )

    def shorten(self) -> int:
        """Forget the oldest quarter of the questions and their replies; returns how many."""
        asked = len(self._turns) // 2
        gone = min(asked, max(1, asked // 4))
        del self._turns[: 2 * gone]
        self._tokens = 0
        return gone

    def command(self, line: str) -> tuple[Action, str]:
        """What a line means: text to say, words to show, or the wish to leave."""
        word, _, rest = line.strip().partition(" ")
        if not word.startswith("/"):
            return "say", line
        return self._steer(word, rest.strip())

    def _steer(self, word: str, rest: str) -> tuple[Action, str]:
        match word:
            case "/exit" | "/quit":
                return "leave", ""
            case "/help" | "/stats":
                return "show", HELP if word == "/help" else self.stats
            case "/image":
                return self._show_image(rest)
            case "/reset":
                self._turns.clear()
                self._images.clear()
                return "show", "the conversation is forgotten"
            case "/system":
                return "show", self._set_system(rest)
        return "show", f"there is no command {word}: /help lists them"

    def _set_system(self, text: str) -> str:
        if text:
            self._turns.clear()
            self._system = None if text == "-" else text
            return "the system message is set" if self._system else "there is none now"
        return self._system or "there is no system message"

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


def _turn(role: str, content: str) -> Turn:
    return {"role": role, "content": content}
