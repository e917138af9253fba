"""A conversation and the commands that steer it, apart from any terminal."""

from typing import Literal

Turn = dict[str, str]
Action = Literal["say", "show", "leave"]

HELP = """/system TEXT  set the system message and start again; - for none
/system       show it
/reset        forget the conversation
/help         this list
/exit         leave, as Ctrl-D does
Ctrl-C cancels a reply."""


class Conversation:
    """The turns so far; a system message, when there is one, comes first."""

    def __init__(self, system: str | None = None) -> None:
        self._system = system
        self._turns: list[Turn] = []

    def messages(self, text: str) -> list[Turn]:
        """All turns with `text` as the user's next one."""
        first = [_turn("system", self._system)] if self._system else []
        return [*first, *self._turns, _turn("user", text)]

    def add(self, text: str, reply: str) -> None:
        """Remember what was said; a cancelled reply counts as far as it came.

        Of one that has no text nothing is remembered: no daemon takes an empty turn.
        """
        if reply:
            self._turns += [_turn("user", text), _turn("assistant", reply)]

    def command(self, line: str) -> tuple[Action, str]:
        """What a line means: text to say, words to show, or the wish to leave."""
        word, _, rest = line.strip().partition(" ")
        if not word.startswith("/"):
            return "say", line
        if word in {"/exit", "/quit"}:
            return "leave", ""
        if word == "/help":
            return "show", HELP
        if word == "/reset":
            self._turns.clear()
            return "show", "the conversation is forgotten"
        if word == "/system":
            return "show", self._set_system(rest.strip())
        return "show", f"there is no command {word}: /help lists them"

    def _set_system(self, text: str) -> str:
        if text:
            self._turns.clear()
            self._system = None if text == "-" else text
            return "the system message is set" if self._system else "there is none now"
        return self._system or "there is no system message"


def _turn(role: str, content: str) -> Turn:
    return {"role": role, "content": content}
