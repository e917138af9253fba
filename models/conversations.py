"""Homes, turns and whole conversations, as messages and as ChatML text."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from random import Random
from typing import Final, NamedTuple

from models.domain import Combination, Context, Device, Draw, Intent, Reply, Turn, likely, weighted
from models.intents import INTENTS
from models.replies import action
from models.vocabulary import MUSIC, ROOMS, SEEN, UNSEEN, compose_name

KINDS: Final = tuple(SEEN)
_WEIGHTS: Final = tuple(3 if kind in {"light", "robot"} else 1 for kind in KINDS)

HEADS: Final = (
    "You are Hearth, the assistant of this home.",
    "You are the assistant of this home.",
    "You control a home.",
    "You are a home and robot assistant.",
    "Answer briefly. Reply to commands with JSON.",
)
PLAIN: Final = (
    *HEADS,
    "You are a helpful assistant.",
    "You are Hearth.",
    "Be brief and friendly.",
    "You are a robot assistant.",
)

Namer = Callable[[Random, str], str]


def seen_name(rng: Random, kind: str) -> str:
    """Return a name of the seen list."""
    return rng.choice(SEEN[kind])


def unseen_name(rng: Random, kind: str) -> str:
    """Return a name of the unseen list."""
    return rng.choice(UNSEEN[kind])


def mixed_names(rng: Random) -> Namer:
    """Return a source of seen and composed names, with a share that varies by home."""
    share = rng.choice((0.0, 0.0, 0.5, 0.5, 1.0))

    def name(source: Random, kind: str) -> str:
        pick = compose_name if likely(source, share) else seen_name
        return pick(source, kind)

    return name


def _state(rng: Random, kind: str) -> str:
    number = rng.randrange(1, 100)
    states: dict[str, Sequence[str]] = {
        "light": ("on", "off", "off", f"on at {number}%"),
        "thermostat": (f"set to {rng.randrange(5, 31)} degrees",),
        "blind": ("open", "closed", f"{number}% open"),
        "lock": ("locked", "unlocked"),
        "speaker": ("off", "paused", f"playing {rng.choice(MUSIC)}"),
        "vacuum": ("docked", "cleaning", "charging"),
        "robot": ("idle", "charging", "busy", "docked"),
        "washer": ("off", "running", "finished"),
    }
    return rng.choice(states.get(kind, ("on", "off")))


def random_home(rng: Random, count: int, namer: Namer) -> tuple[Device, ...]:
    """Return devices with distinct names, in a few rooms."""
    rooms = rng.sample(ROOMS, min(len(ROOMS), 1 + count // 2))
    devices: dict[str, Device] = {}
    for kind in rng.choices(KINDS, _WEIGHTS, k=count):
        name = namer(rng, kind)
        devices.setdefault(name, Device(name, kind, rng.choice(rooms), _state(rng, kind)))
    return tuple(devices.values())


def system_prompt(head: str, devices: Sequence[Device]) -> str:
    """Return the system prompt that lists the devices."""
    lines = [f"- {d.name} ({d.kind}, {d.room}): {d.state}" for d in devices]
    return "\n".join([head, "Devices:", *lines])


NO_LIST: Final = "I have no list of devices."
MAX_ANSWER: Final = 700


def on_device(intent: Intent) -> bool:
    """Return whether the intent is about one device."""
    return bool(intent.slots) and intent.slots[0][0] == "device"


_BY_NAME: Final = {intent.name: intent for intent in INTENTS}
_ACTIONS: Final = tuple(i for i in INTENTS if i.answer is action)
_ON_DEVICE: Final = tuple(i for i in _ACTIONS if on_device(i))
_JOINABLE: Final = tuple(i for i in _ACTIONS if all(key != "text" for key, _ in i.slots))
_OFTEN: Final = tuple(accumulate(intent.weight for intent in INTENTS))
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
    return make_turn(rng.choices(INTENTS, cum_weights=_OFTEN)[0], rng, context)


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


_SIZES: Final = {
    "short": (range(2, 14), range(2, 9)),
    "long": (range(10, 25), range(4, 12)),
    "longest": (range(16, 49), range(8, 25)),
}


Message = dict[str, str]


class Conversation(NamedTuple):
    """A system prompt, which may be empty, and the turns that follow it."""

    system: str
    turns: tuple[Turn, ...]

    def messages(self) -> list[Message]:
        """Return the chat with all of its answers."""
        chat: list[Message] = []
        if self.system:
            chat.append({"role": "system", "content": self.system})
        for turn in self.turns:
            chat.append({"role": "user", "content": turn.user})
            chat.append({"role": "assistant", "content": turn.answer})
        return chat


def render(messages: Sequence[Message], *, prompt: bool = False) -> str:
    """Return the ChatML text that the chat template makes of these messages."""
    parts = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
    return "".join([*parts, "<|im_start|>assistant\n"] if prompt else parts)


def _sizes(rng: Random) -> tuple[int, int]:
    size = weighted(rng, {"short": 0.88, "long": 0.1, "longest": 0.02})
    devices, turns = _SIZES[size]
    return rng.choice(devices), rng.choice(turns)


def random_system(rng: Random, context: Context) -> str:
    """Return a system prompt: with the list, or for an unlisted home plain or empty."""
    if context.listed:
        return system_prompt(rng.choice(HEADS), context.devices)
    return "" if likely(rng, 0.6) else rng.choice(PLAIN)


def random_conversation(rng: Random, allowed: Allowed) -> Conversation:
    """Return a conversation all of whose turns the caller allows."""
    count, length = _sizes(rng)
    devices = random_home(rng, count, mixed_names(rng))
    context = Context(devices, listed=likely(rng, 0.88))
    system = random_system(rng, context)
    turns = []
    for _ in range(length):
        turn = any_turn(rng, context, allowed)
        record(turn, context)
        turns.append(turn)
    return Conversation(system, tuple(turns))
