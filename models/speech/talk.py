"""Whole conversations of everyday speech, with and without tools."""

from collections.abc import Callable
from random import Random
from typing import Final

from models.conversations import Allowed, Conversation, choice_turn, make_turn, record
from models.domain import Context, Turn, likely, weighted
from models.intents import INTENTS
from models.speech import commands, facts, questions, replies, tools
from models.speech.homes import Home, make_home
from models.speech.voice import voiced

_NAMELESS: Final = tuple(
    i for i in INTENTS
    if i.group in {"everyday", "scenes"} and (not i.slots or i.slots[0][0] != "device")
)  # fmt: skip
_CHAT: Final = tuple(i for i in INTENTS if i.group == "talk")
_HOUSEHOLD: Final = tuple(i for i in INTENTS if i.group == "household")
_WAYS: Final = {
    "plain": 0.34, "room": 0.04, "pair": 0.09, "same": 0.05, "split": 0.02, "errand": 0.02,
        "absent": 0.09, "unable": 0.04, "refrain": 0.015,
    "corrected": 0.05, "music": 0.03, "question": 0.13, "nameless": 0.07, "chat": 0.025,
        "household": 0.015, "tell": 0.05, "ask": 0.08, "unknown": 0.015,
}  # fmt: skip
_MAKERS: Final[dict[str, Callable[[Random, Home], Turn | None]]] = {
    "plain": commands.plain_turn, "room": commands.room_turn, "pair": commands.pair_turn,
    "same": commands.same_turn, "split": commands.split_turn, "errand": commands.errand_turn,
    "absent": replies.absent_turn, "unable": replies.unable_turn,
        "refrain": replies.refrain_turn,
}  # fmt: skip
_ONCE: Final = {"set_timer": "timer", "set_alarm": "clock", "add_item": "list",
    "remind": "calendar",
                "send_message": "phone", "call": "phone"}  # fmt: skip
_HEARD: Final = (
    "Done.", "OK.", "All right.", "Sure.", "Got it.", "OK, done.", "Of course.",
        "Okay, I've done that.", "It's done.", "No problem.",
)  # fmt: skip
_NOTED: Final = (
    "Good to know.", "I'll remember that.", "All right, I'll remember.", "Got it.", "OK, noted.",
        "Thanks, I'll keep that in mind.", "Sure, I'll remember.",
    "I'll keep that in mind.", "Okay.", "Nice!", "Lovely, I'll remember that.", "Understood.",
        "Thank you for telling me.", "I have noted that.",
)  # fmt: skip


class Talk:
    """A conversation in one home while it is made."""

    def __init__(self, rng: Random, home: Home, *, listed: bool = True) -> None:
        self.rng = rng
        self.home = home
        self.context: Context = home.context()
        self.context.listed = listed
        self.facts: list[facts.Fact] = []
        self.turns: list[Turn] = []

    def propose(self) -> Turn | None:
        """Return the next turn, or None where that way is closed now."""
        rng, home, context = self.rng, self.home, self.context
        if context.pending is not None and likely(rng, 0.7):
            return choice_turn(rng, context)
        way = weighted(rng, _WAYS)
        if way == "tell":
            return facts.tell_turn(rng, self.facts)
        if way == "ask":
            return facts.ask_turn(rng, self.facts)
        if way == "unknown":
            return facts.unknown_turn(rng, self.facts)
        if way == "chat":
            return make_turn(rng.choice(_CHAT), rng, context)
        if way == "household":
            return self._household()
        if not context.listed:
            return None
        if way == "corrected":
            return replies.corrected_turn(rng, home, self.turns[-1]) if self.turns else None
        if way == "music":
            return replies.music_turn(rng, home, context.touched)
        if way == "question":
            return questions.question_turn(rng, home, context.touched)
        if way == "nameless":
            return self._nameless()
        return _MAKERS[way](rng, home)

    def _household(self) -> Turn | None:
        intent = self.rng.choice(_HOUSEHOLD)
        if any(d.kind == _ONCE[intent.name] for d in self.home.devices):
            return None
        return make_turn(intent, self.rng, self.context)

    def _nameless(self) -> Turn | None:
        turn = make_turn(self.rng.choice(_NAMELESS), self.rng, self.context)
        if turn is None or not likely(self.rng, 0.3):
            return turn
        return turn._replace(user=voiced(self.rng, turn.user.rstrip("."), plain=0.6, told=True))

    def add(self, turn: Turn) -> None:
        """Let a turn be said, at times with an answer that somebody else gave."""
        record(turn, self.context)
        name = turn.intent.removeprefix("speech:")
        shown = ""
        if name == "tell" and likely(self.rng, 0.6):
            shown = self.rng.choice(_NOTED)
        elif turn.answer.startswith("{") and likely(self.rng, 0.04):
            shown = self.rng.choice(_HEARD)
            if likely(self.rng, 0.5):
                state = self.rng.choice(("on", "off", "set", "ready"))
                shown = f"The {turn.combination.device} is {state}."
        self.turns.append(turn._replace(shown=shown))


def speech_conversation(rng: Random, trained: Allowed) -> Conversation:
    """Return a conversation about a home of everyday speech, all of whose turns are trained."""
    talk = Talk(rng, make_home(rng), listed=likely(rng, 0.97))
    length = rng.choice((1, 2, 3, 4, 5, 6, 7, 8, 10, 12))
    while len(talk.turns) < length:
        turn = talk.propose()
        if turn is not None and trained(turn):
            talk.add(turn)
    system = talk.home.system(rng) if talk.context.listed else ""
    return Conversation(system, tuple(talk.turns))


def tool_speech(rng: Random, trained: Allowed) -> Conversation:
    """Return such a conversation in which tools are called."""
    known = tools.kit(rng)
    taken = tools.covers(known)
    talk = Talk(rng, make_home(rng), listed=likely(rng, 0.45))
    length = rng.choice((1, 2, 3, 4, 5, 6, 7))
    while len(talk.turns) < length:
        if likely(rng, 0.75):
            found = tools.some_turns(rng, known)
            if all(map(trained, found)):
                talk.context.pending = None
                talk.context.last = ""
                talk.turns += found
            continue
        turn = talk.propose()
        if turn is None or not trained(turn) or _taken(turn, taken):
            continue
        talk.add(turn)
    system = talk.home.system(rng) if talk.context.listed else ""
    return Conversation(system, tuple(talk.turns), tuple(one.tool.line() for one in known))


_KEPT: Final = frozenset({"tell", "ask", "unknown", "where", "group", "called", "list"})


def _taken(turn: Turn, covers: frozenset[str]) -> bool:
    """Return whether a tool may take over what a turn is about."""
    name = turn.intent.removeprefix("speech:")
    if name in _KEPT:
        return False
    if name in {"state", "off_topic"}:
        return "ask_state" in covers or "off_topic" in covers
    steps = {step.intent for step in turn.steps} | {turn.intent, turn.group}
    return (
        bool(
            covers
            & (steps | {"everyday", "climate", "lights", "switch", "media", "robots", "scenes"})
        )
        and bool(turn.steps)
    ) or bool(covers & steps)
