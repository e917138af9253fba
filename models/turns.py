"""One turn of a conversation: an intent, its slots, its wording and its answer."""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from random import Random
from typing import Final

from models.chances import likely
from models.domain import Combination, Context, Draw, Intent, Reply, Turn
from models.homes import mixed_names, random_home
from models.intents import INTENTS
from models.replies import action

NO_LIST: Final = "I have no list of devices."
MAX_ANSWER: Final = 700


def on_device(intent: Intent) -> bool:
    """Return whether the intent is about one device."""
    return bool(intent.slots) and intent.slots[0][0] == "device"


_BY_NAME: Final = {intent.name: intent for intent in INTENTS}
_ACTIONS: Final = tuple(i for i in INTENTS if i.answer is action)
_ON_DEVICE: Final = tuple(i for i in _ACTIONS if on_device(i))
_JOINABLE: Final = tuple(i for i in _ACTIONS if all(key != "text" for key, _ in i.slots))
_WEIGHTS: Final = tuple(accumulate(intent.weight for intent in INTENTS))
_JOINERS: Final = (" and ", " and then ", ", then ")

Allowed = Callable[[Turn], bool]


def fill(intent: Intent, rng: Random, context: Context) -> Draw | None:
    """Return the intent with its slots filled, or None where the context cannot fill them."""
    draw = Draw(rng, context, {})
    for key, pool in intent.slots:
        value = pool(draw)
        if value is None:
            return None
        draw.slots[key] = value
    return draw


def _wording(phrasing: str, draw: Draw) -> str:
    if draw.slots.get("device") == draw.context.last and likely(draw.rng, 0.6):
        phrasing = phrasing.replace("the {device}", "it")
    elif likely(draw.rng, 0.08) and not phrasing.startswith("the"):
        phrasing = phrasing.replace("the {device}", "{device}")
    return phrasing.format(**draw.slots)


def _voice(rng: Random, text: str, *, polite: bool) -> str:
    question = text.endswith("?")
    if question:
        text = text if likely(rng, 0.8) else text[:-1]
    elif polite and likely(rng, 0.15):
        text = f"please {text}" if likely(rng, 0.6) else f"{text} please"
    if likely(rng, 0.05):
        text = f"hey Hearth, {text}"
    if likely(rng, 0.75):
        text = text[0].upper() + text[1:]
    return text if question or likely(rng, 0.6) else f"{text}."


def make_turn(intent: Intent, rng: Random, context: Context) -> Turn | None:
    """Return one turn of this intent, or None where the context does not allow it."""
    draw = fill(intent, rng, context)
    if draw is None:
        return None
    hidden = intent.needs_list and not context.listed
    reply = Reply(NO_LIST, empty=True) if hidden else intent.answer(intent, draw)
    if not reply.text or len(reply.text) > MAX_ANSWER:
        return None
    wording = _wording(rng.choice(intent.phrasings), draw)
    text = _voice(rng, wording, polite=intent.group not in {"talk", "facts"})
    combination = intent.combination(draw.slots, reply)
    return Turn(intent.name, intent.group, text, reply.text, combination, reply.steps)


def missing_turn(rng: Random, context: Context) -> Turn | None:
    """Return a command for a device that is not in the list, and the refusal."""
    stranger = random_home(rng, 1, mixed_names(rng))
    name = stranger[0].name
    if any(device.name == name for device in context.devices):
        return None
    turn = make_turn(rng.choice(_ON_DEVICE), rng, Context(stranger, listed=True))
    if turn is None:
        return None
    combination = Combination("missing", name, turn.intent)
    answer = f"I cannot find the {name} here."
    return Turn("missing", "refusals", turn.user, answer, combination, ())


def pair_turn(rng: Random, context: Context) -> Turn | None:
    """Return two commands in one message, answered by a list of two actions."""
    plain = replace(context, last="")
    intents = rng.choice(_JOINABLE), rng.choice(_JOINABLE)
    draws = [fill(intent, rng, plain) for intent in intents]
    first, second = draws
    if first is None or second is None:
        return None
    parts = [
        _part(rng, intent, draw) for intent, draw in zip(intents, (first, second), strict=True)
    ]
    texts, answers, steps = zip(*parts, strict=True)
    user = _voice(rng, rng.choice(_JOINERS).join(texts), polite=True)
    combination = Combination("pair", f"{steps[0].intent}|{steps[0].device}", "|".join(steps[1]))
    return Turn("pair", "plans", user, f"[{','.join(answers)}]", combination, steps)


def _part(rng: Random, intent: Intent, draw: Draw) -> tuple[str, str, Combination]:
    phrasing = rng.choice([p for p in intent.phrasings if not p.endswith("?")])
    reply = intent.answer(intent, draw)
    return _wording(phrasing, draw), reply.text, intent.combination(draw.slots, reply)


def any_turn(rng: Random, context: Context, allowed: Allowed) -> Turn:
    """Return a turn of a random intent that the context and the caller allow."""
    while True:
        turn = _propose(rng, context)
        if turn is not None and allowed(turn):
            return turn


def _propose(rng: Random, context: Context) -> Turn | None:
    if likely(rng, 0.05):
        return pair_turn(rng, context)
    if context.listed and likely(rng, 0.08):
        return missing_turn(rng, context)
    return make_turn(rng.choices(INTENTS, cum_weights=_WEIGHTS)[0], rng, context)


def record(turn: Turn, context: Context) -> None:
    """Let the context remember what the turn stated, changed and spoke of."""
    intent = _BY_NAME.get(turn.intent)
    if intent is None:
        context.touched.update(step.device for step in turn.steps)
        context.last = ""
        return
    if intent.remembers:
        facts = context.facts.setdefault(intent.remembers, {})
        facts[turn.combination.device] = turn.combination.value
    if intent.group not in {"questions", "facts", "talk"}:
        context.touched.update((turn.combination.device, *(s.device for s in turn.steps)))
    context.last = turn.combination.device if on_device(intent) else ""


def state_fact(fact: str, rng: Random, context: Context, allowed: Allowed) -> Turn:
    """Return a turn that states a fact, for a later question to ask about."""
    tell = next(intent for intent in INTENTS if intent.remembers == fact)
    while True:
        turn = make_turn(tell, rng, context)
        if turn is not None and allowed(turn):
            return turn
