"""Commands to devices that are named in full, in part or by their room, and what they get."""

import re
from collections.abc import Sequence
from random import Random
from typing import Final, NamedTuple

from models.conversations import fill, kinds_of, on_device
from models.domain import Combination, Context, Device, Intent, Pending, Turn, likely
from models.intents import INTENTS
from models.replies import action, as_json, combination_of
from models.speech.homes import PLACES, SHOWN, Home
from models.speech.phrasings import MORE, SPECIAL
from models.speech.values import VALUES
from models.speech.voice import (
    said_minutes,
    said_number,
    said_time,
    small,
    upper,
    voiced,
)
from models.wording import may_ask, question

_BY_PLACE: Final = frozenset({"lock", "blind"})
_VOCATIVE: Final = re.compile(r"^(?:let|have|make|tell|ask|get) the \{device\} (?:to )?(.+)$")
ACTIONS: Final = tuple(i for i in INTENTS if i.answer is action and on_device(i))
ERRANDS: Final = tuple(i for i in INTENTS if i.group == "plans" and on_device(i))
NAMED: Final = {intent.name: intent for intent in ACTIONS}


def _phrasings(intent: Intent) -> tuple[str, ...]:
    called = [_VOCATIVE.match(text) for text in intent.phrasings]
    ways = (f"the {{device}}, {one[1]}" for one in called if one)
    return (*intent.phrasings, *ways, *MORE.get(intent.name, ()) * 2)


PHRASINGS: Final = {intent.name: _phrasings(intent) for intent in (*ACTIONS, *ERRANDS)}


class Reference(NamedTuple):
    """A name that a user gives a device, and the devices that it may mean."""

    text: str
    found: tuple[Device, ...]


def words_in(noun: str, device: Device) -> bool:
    """Return whether a device is called by a noun."""
    return f" {noun.lower()} " in f" {device.name.lower()} "


def _by_noun(home: Home, devices: Sequence[Device], noun: str) -> tuple[Device, ...] | None:
    """Return the devices that a noun may mean: those that it names, else those of its kind."""
    told = [d for d in devices if noun.lower() in {word.lower() for word in home.said(d)}]
    named = [d for d in devices if words_in(noun, d)]
    if named and set(told) - set(named) and any(noun in SHOWN[d.kind].said[:1] for d in home.shown):
        return None  # "the light" where only one of two lights is called so: who knows
    return tuple(named or told)


def refer(rng: Random, home: Home, device: Device, kinds: Sequence[str]) -> Reference | None:
    """Return a way to name a device, with all devices of these kinds that it fits."""
    able = [d for d in home.devices if not kinds or d.kind in kinds]
    name, room = device.name, device.room
    way = rng.random()
    if way < 0.42:
        return Reference(name, (device,))
    noun = rng.choice((*home.said(device), name.split()[-1]))
    if way < 0.66:
        if any(d.name == noun for d in home.devices):
            return Reference(noun, tuple(d for d in able if d.name == noun))
        found = _by_noun(home, able, noun)
        if found is not None and len(found) == 1 and likely(rng, 0.15):
            noun = plural_of(noun)
        return None if found is None else Reference(noun, found)
    if way < 0.84:
        there = [d for d in able if room == d.room or d.name.startswith(f"{room} ")]
        found = _by_noun(home, there, noun)
        text = rng.choice((f"{room} {noun}", f"{noun} in the {room}", f"{noun} in the {room}"))
        if found is None or any(text in d.name and d.name != name for d in home.devices):
            return None
        return Reference(text, found)
    if kinds and _BY_PLACE.issuperset(kinds) and likely(rng, 0.6):
        place = room if likely(rng, 0.4) else " ".join(name.split()[:-1]) or room
        found = tuple(d for d in able if d.name.lower().startswith(place.lower() + " "))
        found = found or tuple(d for d in able if d.room == place)
        return Reference(place, found) if found else None
    first, *rest = name.split()
    if not rest or first.endswith("'s"):
        return Reference(name, (device,))
    head = " ".join(name.split()[:-1])
    text = rng.choice((head, f"{head} one", f"{head} {noun}"))
    found = tuple(d for d in able if d.name.lower().startswith(head.lower() + " "))
    if text == head and any(
        head in {d.room, *d.name.split()} for d in home.devices if d not in found
    ):
        return None
    return Reference(text, found)


class Command(NamedTuple):
    """A command: its words, its step without a device, and what the reference means."""

    intent: str
    text: str
    slots: dict[str, str]
    reference: Reference
    told: bool

    def steps(self) -> list[dict[str, str]]:
        """Return the one action, where one device is meant."""
        return [step_of(self.intent, device.name, self.slots) for device in self.reference.found]


def step_of(name: str, device: str, slots: dict[str, str]) -> dict[str, str]:
    """Return an action on a device."""
    return {"action": name, "device": device, **slots}


def spoken(rng: Random, phrasing: str, slots: dict[str, str], said: str) -> str:
    """Return a phrasing whose values are said as people say them."""
    shown = dict(slots)
    if "minutes" in slots:
        phrasing = said_minutes(rng, phrasing, slots["minutes"])
    if "time" in slots:
        shown["time"] = said_time(rng, slots["time"])
    for key in ("value", "degrees", "cm"):
        if key in slots:
            shown[key] = said_number(rng, slots[key])
    article = rng.random()
    if (
        said[:1].isupper() and said.split(maxsplit=1)[0] not in {"TV", "AC", "LED"}
    ) or "'s " in said:
        phrasing = phrasing.replace("the {device}", "{device}")
    elif article < 0.12:
        phrasing = phrasing.replace(
            "the {device}", f"{rng.choice(('my', 'our', 'that'))} {{device}}"
        )
    elif article < 0.2:
        phrasing = phrasing.replace("the {device}", "{device}")
    return phrasing.format(**{**shown, "device": said})


def slots_of(rng: Random, intent: Intent, device: Device) -> dict[str, str] | None:
    """Return values for the slots of an intent but its device."""
    draw = fill(intent, rng, Context((device,), listed=False))
    if draw is None:
        return None
    slots = {key: value for key, value in draw.slots.items() if key != "device"}
    for key in slots:
        pool = VALUES.get((intent.name, key)) or VALUES.get(("", key))
        if pool and likely(rng, 0.6):
            slots[key] = pool(rng)
    return slots


def command(
    rng: Random, home: Home, intent: Intent | None = None, target: Device | None = None
) -> Command | None:
    """Return a command of an intent for a device of the home, or for a stranger to it."""
    device = target or rng.choice(home.devices)
    special = SPECIAL.get(device.kind)
    if special and intent is None:
        return _special(rng, device)
    fitting = [i for i in ACTIONS if device.kind in kinds_of(i)]
    if intent is None:
        if not fitting:
            return None
        often = [3 if i.name in {"turn_on", "turn_off", "open", "close"} else 1 for i in fitting]
        intent = rng.choices(fitting, often)[0]
    slots = slots_of(rng, intent, device._replace(kind=kinds_of(intent)[0]))
    reference = refer(rng, home, device, kinds_of(intent)) if device in home.devices else None
    if slots is None or reference is None:
        return None
    phrasing = rng.choice(PHRASINGS[intent.name])
    text = spoken(rng, phrasing, slots, reference.text)
    told = any(key in {"text", "task"} for key in slots)
    return Command(intent.name, text, slots, reference, told)


def _special(rng: Random, device: Device) -> Command:
    names = [name for name, kinds in _SPECIAL_KINDS.items() if device.kind in kinds]
    name = rng.choice(names)
    intent = _HOUSEHOLD[name]
    draw = fill(intent, rng, Context((), listed=False))
    slots = dict(draw.slots) if draw else {}
    for key in slots:
        pool = VALUES.get((name, key)) or VALUES.get(("", key))
        if pool and likely(rng, 0.6):
            slots[key] = pool(rng)
    phrasing = rng.choice((*intent.phrasings, *SPECIAL[device.kind][name] * 3))
    text = spoken(rng, phrasing, slots, device.name)
    told = any(key in {"text", "task"} for key in slots)
    return Command(name, text, slots, Reference(device.name, (device,)), told)


_HOUSEHOLD: Final = {intent.name: intent for intent in INTENTS if intent.group == "household"}
_SPECIAL_KINDS: Final = {
    "set_timer": ("timer",), "set_alarm": ("clock",), "add_item": ("list",),
    "remind": ("calendar",), "send_message": ("phone",), "call": ("phone",),
}  # fmt: skip


def made(intent: str, user: str, steps: Sequence[dict[str, str]], *, plan: bool = False) -> Turn:
    """Return a turn whose answer are these actions."""
    combinations = tuple(map(combination_of, steps))
    answer = ",".join(map(as_json, steps))
    if plan or len(steps) != 1:
        answer = f"[{answer}]"
    return Turn(f"speech:{intent}", "speech", user, answer, combinations[0], combinations)


def said(name: str, user: str, answer: str, subject: str = "") -> Turn:
    """Return a turn whose answer is a sentence."""
    combination = Combination(f"speech:{name}", subject, "")
    return Turn(f"speech:{name}", "speech", user, answer, combination, ())


def kept_of(one: Command) -> tuple[str, ...]:
    """Return the words of a command that its answer copies."""
    return (one.reference.text, *one.slots.values())


_SIGHS: Final = (
    "I forgot about {0}", "{0} is still on", "{0} bothers me", "see {0}?",
    "{0} again", "about {0}", "you know {0}", "I'm looking at {0}", "{0} is annoying me",
    "I'm not sure about {0}", "I can't reach {0}", "I'm next to {0}", "{0} is too much right now",
    "I need {0} for a moment", "it's about {0}", "there's something with {0}", "so, {0}",
    "I hear {0} from here", "{0} is what I need", "I was thinking of {0}", "{0}, you know",
)  # fmt: skip


def plain_turn(rng: Random, home: Home) -> Turn | None:
    """Return one command and its action, the question which one, or the refusal."""
    one = command(rng, home)
    if one is None:
        return None
    text, found = one.text, one.reference.found
    article = f"the {one.reference.text}"
    if article in text and not one.told and likely(rng, 0.12):
        body = text.replace(article, "it", 1)
        mark = rng.choice((". ", ", ", ": ", " - ", "! "))
        head = rng.choice(_SIGHS).format(
            rng.choice((article, article, f"that {one.reference.text}"))
        )
        user = f"{upper(head)}{mark}{upper(body) if mark in {'. ', '! '} else body}"
        user += rng.choice((".", ".", ", please.", "", " please"))
    else:
        user = voiced(rng, text, kept_of(one), told=one.told)
    return outcome(one, user, found)


def outcome(one: Command, user: str, found: Sequence[Device]) -> Turn | None:
    """Return the turn of a command that is meant for these devices."""
    if len(found) == 1:
        return made(one.intent, user, one.steps())
    if not may_ask(tuple(found)):
        return None
    names = tuple(device.name for device in found)
    turn = said("which", user, question(names), "|".join(names))
    return turn._replace(pending=Pending(one.intent, dict(one.slots), names))


def room_turn(rng: Random, home: Home) -> Turn | None:
    """Return a command whose room is told in a clause before it."""
    one = command(rng, home)
    if one is None or one.intent in {"go", "clean"} or one.told:
        return None
    device = rng.choice(home.devices) if not one.reference.found else one.reference.found[0]
    noun = rng.choice(home.said(device))
    intent = NAMED.get(one.intent)
    if intent is None:
        return None
    able = [d for d in home.devices if d.kind in kinds_of(intent) and d.room == device.room]
    found = _by_noun(home, able, noun)
    if not found:
        return None
    where = rng.choice(("in there", "there", "over there", "in that room", "for me there"))
    head = rng.choice(_IN_ROOM).format(device.room)
    body = spoken(rng, rng.choice(PHRASINGS[intent.name]), one.slots, noun).rstrip("?")
    mark = rng.choice((". ", ", ", ", so ", "! "))
    user = f"{upper(head)}{mark}{upper(body) if mark in {'. ', '! '} else body} {where}"
    user += rng.choice((".", ", please.", "", "!"))
    step = one._replace(reference=Reference(noun, found))
    return outcome(step, user, found)


_IN_ROOM: Final = (
    "the {0} is too warm", "it's cold in the {0}", "I'm in the {0}",
    "I'm going to the {0}", "the {0} is so dark", "somebody is in the {0}", "it's loud in the {0}",
    "the kids are in the {0}", "we're sitting in the {0}", "the {0} is a mess",
        "it's hot in the {0}",
    "I can't see anything in the {0}", "I just came from the {0}", "I need the {0} ready",
    "the {0} needs some care", "nobody is in the {0}", "we're done in the {0}", "the {0} is stuffy",
)  # fmt: skip

_BOTH_JOIN: Final = (
    " and ", " and ", ", and ", " and then ", ", then ", ", also ", ". Also, ", " and also ", "; ",
    " plus ", ", after that ", ". Then ", " & ", ". And ", " and please ",
)  # fmt: skip


def pair_turn(rng: Random, home: Home) -> Turn | None:
    """Return two or three commands in one message, and the list of their actions."""
    wanted = 3 if likely(rng, 0.12) else 2
    parts = [command(rng, home) for _ in range(wanted)]
    chosen = [one for one in parts if one and len(one.reference.found) == 1 and "?" not in one.text]
    if len(chosen) != wanted or any(one.told for one in chosen[:-1]):
        return None
    told = chosen[-1].told
    text = chosen[0].text
    for one in chosen[1:]:
        mark = rng.choice(_BOTH_JOIN)
        text += f"{mark}{upper(one.text) if mark == '. ' else small(one.text)}"
    if likely(rng, 0.1):
        head = rng.choice(("two things", "please do this", "everybody ready", "evening routine",
                           "a few things", "for the night", "OK, listen", "first"))  # fmt: skip
        text = f"{head}: {small(text)}"
    kept = [word for one in chosen for word in kept_of(one)]
    user = voiced(rng, text, kept, told=told)
    return made("pair", user, [step for one in chosen for step in one.steps()], plan=True)


def same_turn(rng: Random, home: Home) -> Turn | None:
    """Return one command for two or three named devices, or for both of a kind."""
    one = command(rng, home)
    if one is None or one.intent not in NAMED or one.told:
        return None
    kinds = kinds_of(NAMED[one.intent])
    able = [d for d in home.devices if d.kind in kinds]
    if len(able) < 2:
        return None
    phrasing = rng.choice(PHRASINGS[one.intent])
    if "{device}'s" in phrasing or phrasing.endswith("?"):
        return None
    if likely(rng, 0.35):
        return _group_turn(rng, home, one, phrasing)
    chosen = rng.sample(able, 3 if len(able) > 2 and likely(rng, 0.15) else 2)
    named = [refer(rng, home, device, kinds) for device in chosen]
    if any(r is None or len(r.found) != 1 for r in named):
        return None
    texts = [r.text for r in named if r]
    joined = f"{', the '.join(texts[:-1])} and {'the ' if likely(rng, 0.8) else ''}{texts[-1]}"
    user = voiced(rng, spoken(rng, phrasing, one.slots, joined), (*texts, *one.slots.values()))
    steps = [step_of(one.intent, device.name, one.slots) for device in chosen]
    return made("pair", user, steps, plan=True)


def plural_of(noun: str) -> str:
    """Return the plural of a noun."""
    return (
        noun if noun.endswith("s") else f"{noun}es" if noun.endswith(("ch", "sh")) else f"{noun}s"
    )


def _group_turn(rng: Random, home: Home, one: Command, phrasing: str) -> Turn | None:
    device = one.reference.found[0] if one.reference.found else rng.choice(home.devices)
    noun = home.said(device)[0]
    room = device.room if likely(rng, 0.4) else ""
    group = [d for d in home.devices if noun in home.said(d) and (not room or d.room == room)]
    if len(group) < 2 or any(noun in d.name and d not in group for d in home.devices if not room):
        return None
    many = plural_of(noun)
    ways = [f"all the {many}", f"all {many}", f"all of the {many}", f"every {noun}"]
    if one.intent in {"turn_on", "turn_off", "open", "close", "lock", "unlock"}:
        ways += [f"the {many}", f"the {many}", many]
    if len(group) == 2:
        ways = [f"both {many}", f"both the {many}", f"both of the {many}", f"the two {many}", *ways]
    text = rng.choice(ways) + (f" in the {room}" if room else "")
    body = spoken(rng, phrasing.replace("the {device}", "{device}"), one.slots, text)
    if len(group) == len({d.room for d in group}) == 2 and likely(rng, 0.25):
        a, b = rng.sample([d.room for d in group], 2)
        body += rng.choice((", the {0} one and the {1} one", ": {0} and {1}",
            ", the one in the {0} and the one in the {1}",
                            ", in the {0} and in the {1}",
                                ", the {1} one first, then the {0} one")).format(a, b)  # fmt: skip
    user = voiced(rng, body, tuple(one.slots.values()))
    steps = [step_of(one.intent, d.name, one.slots) for d in group]
    return made("pair", user, steps, plan=True)


def split_turn(rng: Random, home: Home) -> Turn | None:
    """Return a short message of devices, each with `on` or `off`."""
    able = [d for d in home.devices if d.kind in kinds_of(NAMED["turn_on"])]
    if len(able) < 2:
        return None
    chosen = rng.sample(able, min(len(able), rng.choice((2, 2, 2, 3))))
    parts, steps = [], []
    for device in chosen:
        reference = refer(rng, home, device, kinds_of(NAMED["turn_on"]))
        if reference is None or len(reference.found) != 1:
            return None
        state = rng.choice(("on", "off"))
        parts.append(rng.choice((f"{reference.text} {state}", f"{reference.text} {state}",
                                 f"the {reference.text} {state}")))  # fmt: skip
        steps.append(step_of(f"turn_{state}", device.name, {}))
    text = rng.choice((", ", " and ", ", ")).join(parts) if len(parts) == 2 else ", ".join(parts)
    if likely(rng, 0.25):
        head = rng.choice(("please", "quickly", "now", "switches", "all right", "as always"))
        text = f"{head}: {text}"
    return made("pair", voiced(rng, text, parts), steps, plan=True)


def errand_turn(rng: Random, home: Home) -> Turn | None:
    """Return an errand of a robot, and its plan."""
    robots = [d for d in home.devices if d.kind == "robot"]
    if not robots:
        return None
    intent, device = rng.choice(ERRANDS), rng.choice(robots)
    draw = fill(intent, rng, Context((device,), listed=False))
    reference = refer(rng, home, device, ("robot",))
    if draw is None or reference is None or len(reference.found) != 1:
        return None
    for key in draw.slots:
        if key in {"room", "from", "to", "first", "second", "third"} and likely(rng, 0.5):
            draw.slots[key] = rng.choice([p for p in PLACES if p not in draw.slots.values()])
    reply = intent.answer(intent, draw)
    slots = {key: value for key, value in draw.slots.items() if key != "device"}
    text = spoken(rng, rng.choice(PHRASINGS[intent.name]), slots, reference.text)
    user = voiced(rng, text, (reference.text, *slots.values()))
    combination = Combination(intent.name, device.name, "|".join(slots.values()))
    return Turn(f"speech:{intent.name}", "speech", user, reply.text, combination, reply.steps)
