"""Homes, turns and whole conversations, as messages and as ChatML text."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from random import Random
from typing import Final, NamedTuple

from models.domain import (
    Combination,
    Context,
    Device,
    Draw,
    Intent,
    Pending,
    Reply,
    Turn,
    likely,
    weighted,
)
from models.intents import INTENTS
from models.pools import Devices
from models.replies import action, as_json, combination_of
from models.vocabulary import MUSIC, ROOMS, SEEN, UNSEEN, compose_name
from models.wording import (
    choices,
    in_part,
    is_command,
    lead,
    may_ask,
    meant,
    polite,
    question,
    shortened,
    stranger,
)

KINDS: Final = tuple(SEEN)
_AT_HOME: Final = 0.8
"""Devices with the name of a room that are in this room."""
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
    """Return a source of seen, composed and rooms' names, with shares that vary by home."""
    share, of_rooms = rng.choice((0.0, 0.0, 0.5, 0.5, 1.0)), rng.choice((0.0, 0.0, 0.3, 0.6))

    def name(source: Random, kind: str) -> str:
        if likely(source, of_rooms):
            return f"{source.choice(ROOMS)} {source.choice(SEEN[kind]).split()[-1]}"
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
        "sensor": (f"{number // 3} degrees", f"{number}%", "clear", "dry", "active"),
    }
    return rng.choice(states.get(kind, ("on", "off")))


def random_home(rng: Random, count: int, namer: Namer) -> tuple[Device, ...]:
    """Return devices with distinct names, in a few rooms."""
    rooms = rng.sample(ROOMS, min(len(ROOMS), 1 + count // 2))
    devices: dict[str, Device] = {}
    for kind in rng.choices(KINDS, _WEIGHTS, k=count):
        name = namer(rng, kind)
        room = next(filter(name.startswith, ROOMS), "") if likely(rng, _AT_HOME) else ""
        devices.setdefault(name, Device(name, kind, room or rng.choice(rooms), _state(rng, kind)))
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
_IN_PART: Final = 0.3
_ALL: Final = ("all of them", "all", "all of them, please", "every one of them")
_BOTH: Final = ("both", "both of them")
_SEVERAL: Final = frozenset({"blinds", "curtains", "sprinklers"})
_UNABLE: Final[dict[str, tuple[str, ...]]] = {
    "switch": ("lock", "blind", "sensor"),
    "lights": ("lock", "speaker", "sensor", "robot", "washer"),
    "climate": ("light", "plug", "lock", "camera", "sensor"),
    "media": ("light", "plug", "lock", "camera", "sensor"),
    "appliances": ("light", "plug", "lock", "sensor"),
    "robots": ("light", "plug", "lock", "camera", "sensor"),
    "access": ("light", "plug", "speaker", "tv", "sensor", "robot", "vacuum"),
}
"""Kinds that do not know what intents of a group do, by the group."""

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


def kinds_of(intent: Intent) -> tuple[str, ...]:
    """Return the kinds of the devices that an intent is about, none where it may be any."""
    pool = intent.slots[0][1]
    return pool.kinds if isinstance(pool, Devices) else ()


def _wording(phrasing: str, draw: Draw, said: str = "") -> str:
    rng, device = draw.rng, draw.slots.get("device")
    phrasing = shortened(rng, phrasing)
    if device and device == draw.context.last and likely(rng, 0.6):
        phrasing = phrasing.replace("the {device}", "it")
    elif device and (said or likely(rng, 0.3)):
        phrasing = lead(rng, phrasing)
    slots = {**draw.slots, "device": said} if said else draw.slots
    return phrasing.format(**slots)


def voiced(rng: Random, text: str, *, command: bool = True, told: bool = False) -> str:
    """Return a request as somebody says it; what is `told` ends with words that are passed on."""
    if command and is_command(text) and likely(rng, 0.5):
        text = f"please {text}" if told else polite(rng, text)
    question = text.endswith("?")
    if question:
        text = text if likely(rng, 0.8) else text[:-1]
    if likely(rng, 0.04):
        text = f"hey Hearth, {text}"
    if likely(rng, 0.75):
        text = text[0].upper() + text[1:]
    return text if question or likely(rng, 0.6) else f"{text}."


def _voice(rng: Random, text: str, intent: Intent) -> str:
    command = intent.group not in {"talk", "facts"}
    told = any(key in {"text", "task"} for key, _ in intent.slots)
    return voiced(rng, text, command=command, told=told)


def make_turn(intent: Intent, rng: Random, context: Context) -> Turn | None:
    """Return one turn of this intent, or None where the context does not allow it."""
    draw = fill(intent, rng, context)
    if draw is None:
        return None
    hidden = intent.needs_list and not context.listed
    reply = Reply(NO_LIST, empty=True) if hidden else intent.answer(intent, draw)
    if not reply.text or len(reply.text) > MAX_ANSWER:
        return None
    wording = _wording(rng.choice(intent.phrasings), draw, _said(intent, draw))
    text = _voice(rng, wording, intent)
    combination = intent.combination(draw.slots, reply)
    turn = Turn(intent.name, intent.group, text, reply.text, combination, reply.steps)
    return turn._replace(pending=reply.pending)


def _said(intent: Intent, draw: Draw) -> str:
    """Return what the device is called in part, nothing where it is called by its name."""
    context, name = draw.context, draw.slots.get("device", "")
    if not name or not context.listed or name == context.last or not likely(draw.rng, _IN_PART):
        return ""
    kinds = kinds_of(intent)
    said = in_part(draw.rng, context.find(name), kinds)
    return said.text if len(meant(context, kinds, said)) == 1 else ""


def which_turn(rng: Random, context: Context) -> Turn | None:
    """Return a command that several devices fit, and the question which one is meant."""
    intent = rng.choice(_ON_DEVICE)
    draw = fill(intent, rng, context)
    if draw is None:
        return None
    kinds = kinds_of(intent)
    said = in_part(rng, context.find(draw.slots.pop("device")), kinds)
    found = meant(context, kinds, said)
    if not may_ask(found) or said.text in _SEVERAL:
        return None
    names = tuple(device.name for device in found)
    pending = Pending(intent.name, dict(draw.slots), names)
    draw.slots["device"] = said.text
    text = _voice(rng, _wording(rng.choice(intent.phrasings), draw, said.text), intent)
    combination = Combination("which", intent.name, "|".join(names))
    return Turn("which", "which", text, question(names), combination, (), pending)


def choice_turn(rng: Random, context: Context) -> Turn | None:
    """Return the answer to the question which device is meant, and the action."""
    if context.pending is None:
        return None
    intent, slots, names = context.pending
    steps = [{"action": intent, "device": name, **slots} for name in names]
    if likely(rng, 0.1):
        text = rng.choice(_BOTH if len(names) == len(_BOTH) else _ALL)
        combinations = tuple(map(combination_of, steps))
        answer = f"[{','.join(map(as_json, steps))}]"
        return Turn("choice", "which", text, answer, Combination(intent, "", ""), combinations)
    chosen = rng.randrange(len(names))
    text = choices(rng, [context.find(name) for name in names], chosen)
    if likely(rng, 0.5):
        text = text[0].upper() + text[1:]
    combination = combination_of(steps[chosen])
    return Turn("choice", "which", text, as_json(steps[chosen]), combination, (combination,))


def absent_turn(rng: Random, context: Context) -> Turn | None:
    """Return a command for a device that is called in part and is not there, and the refusal."""
    if not context.devices:
        return None
    intent, near = rng.choice(_ON_DEVICE), rng.choice(context.devices)
    kinds = kinds_of(intent)
    kind = rng.choice(kinds)
    said = stranger(rng, kind, near, (near.room, *ROOMS))
    words = set(said.text.split())
    if meant(context, kinds, said) or any(
        words <= {*device.name.split(), *device.room.split()}
        for device in context.devices
        if device.kind in kinds
    ):
        return None
    draw = fill(intent, rng, Context((Device(said.text, kind, near.room, ""),), listed=False))
    if draw is None:
        return None
    text = _voice(rng, _wording(rng.choice(intent.phrasings), draw, said.text), intent)
    combination = Combination("absent", said.text, intent.name)
    answer = f"I cannot find the {said.text} here."
    return Turn("absent", "refusals", text, answer, combination, ())


def unable_turn(rng: Random, context: Context) -> Turn | None:
    """Return a command that a device of its kind does not know, and the refusal."""
    if not context.devices:
        return None
    intent, device = rng.choice(_ON_DEVICE), rng.choice(context.devices)
    if device.kind not in _UNABLE.get(intent.group, ()) or device.kind in kinds_of(intent):
        return None
    draw = fill(intent, rng, Context((device._replace(kind=kinds_of(intent)[0]),), listed=False))
    if draw is None:
        return None
    text = _voice(rng, _wording(rng.choice(intent.phrasings), draw), intent)
    combination = Combination("unable", device.name, intent.name)
    answer = f"The {device.name} cannot do that."
    return Turn("unable", "refusals", text, answer, combination, ())


def missing_turn(rng: Random, context: Context) -> Turn | None:
    """Return a command for a device that is not in the list, and the refusal."""
    strangers = random_home(rng, 1, mixed_names(rng))
    name = strangers[0].name
    if any(device.name == name for device in context.devices):
        return None
    turn = make_turn(rng.choice(_ON_DEVICE), rng, Context(strangers, listed=False))
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
    user = voiced(rng, rng.choice(_JOINERS).join(texts))
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
    if context.pending is not None and likely(rng, 0.8):
        return choice_turn(rng, context)
    if likely(rng, 0.05):
        return pair_turn(rng, context)
    if context.listed and likely(rng, 0.22):
        make = rng.choice(
            (missing_turn, absent_turn, absent_turn, unable_turn, which_turn, which_turn)
        )
        return make(rng, context)
    return make_turn(rng.choices(INTENTS, cum_weights=_OFTEN)[0], rng, context)


def record(turn: Turn, context: Context) -> None:
    """Let the context remember what the turn stated, changed and spoke of."""
    intent = _BY_NAME.get(turn.intent)
    context.pending = turn.pending
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
    """A system prompt, which may be empty, the turns that follow it, and tools as JSON lines."""

    system: str
    turns: tuple[Turn, ...]
    tools: tuple[str, ...] = ()

    def messages(self) -> list[Message]:
        """Return the chat with all of its answers."""
        chat: list[Message] = []
        if self.system:
            chat.append({"role": "system", "content": self.system})
        for turn in self.turns:
            chat.append({"role": "user", "content": turn.user})
            chat.append({"role": "assistant", "content": turn.shown or turn.answer})
            chat += [{"role": "tool", "content": result} for result in turn.results]
            if turn.reply:
                chat.append({"role": "assistant", "content": turn.reply})
        return chat

    def foreign(self) -> frozenset[int]:
        """Return which of the assistant's messages, by their order, others gave."""
        given: list[bool] = []
        for turn in self.turns:
            given += [bool(turn.shown), *([False] if turn.reply else [])]
        return frozenset(index for index, one in enumerate(given) if one)


def render(messages: Sequence[Message], tools: Sequence[str] = (), *, prompt: bool = False) -> str:
    """Return the ChatML text that the chat template makes of these messages and tools."""
    parts, rest = [], list(messages)
    if tools:
        system = f"{rest.pop(0)['content']}\n\n" if rest and rest[0]["role"] == "system" else ""
        shown = "\n".join(("# Tools", "<tools>", *tools, "</tools>"))
        parts.append(f"<|im_start|>system\n{system}{shown}<|im_end|>\n")
    for role, group in groupby(rest, key=lambda message: message["role"]):
        texts = [message["content"] for message in group]
        if role == "tool":
            results = "".join(f"\n<tool_response>\n{text}\n</tool_response>" for text in texts)
            parts.append(f"<|im_start|>user{results}<|im_end|>\n")
        else:
            parts += [f"<|im_start|>{role}\n{text}<|im_end|>\n" for text in texts]
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
