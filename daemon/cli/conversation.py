"""A conversation and the commands that steer it, apart from any terminal."""

from pathlib import Path
from typing import Any, Literal

from hearth_client import HearthClientError, Image

Turn = dict[str, Any]
Action = Literal["say", "show", "refuse", "leave"]

HELP = """/system TEXT  set the system message and start again; - for none
/system       show it
/image PATH   show a picture with the next message; - for none
/reset        forget the conversation
/help         this list
/exit         leave, as Ctrl-D does
Ctrl-C cancels a reply."""


class Conversation:
    """The turns so far; a system message, when there is one, comes first."""

    def __init__(self, system: str | None = None) -> None:
        self._system = system
        self._turns: list[Turn] = []
        self._images: list[Image] = []

    @property
    def images(self) -> int:
        """How many pictures go with the next message, also where one has failed."""
        return len(self._images)

    def messages(self, text: str) -> list[Turn]:
        """All turns with `text` as the user's next one."""
        first = [_turn("system", self._system)] if self._system else []
        return [*first, *self._turns, self._asked(text)]

    def add(self, text: str, reply: str) -> None:
        """Remember what was said; a cancelled reply counts as far as it came.

        Of one that has no text nothing is remembered: no daemon takes an empty turn.
        """
        if reply:
            self._turns += [self._asked(text), _turn("assistant", reply)]
        self._images.clear()

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
            case "/help":
                return "show", HELP
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
        elif path:
            try:
                self._images.append(Image(Path(path).expanduser()))
            except OSError as error:
                return "refuse", f"{path} cannot be read: {error.strerror}"
            except HearthClientError as error:
                return "refuse", f"{path}: {error.message}"
        return "show", f"pictures for the next message: {self.images}"


def _turn(role: str, content: str) -> Turn:
    return {"role": role, "content": content}
