"""Pools of values for the slots of intents."""

from collections.abc import Sequence

from models.domain import Draw, Pool, likely
from models.vocabulary import DAYS, GROCERIES, ITEMS, MONTHS, PLACES, PLURALS, ROOMS, compose_word

SWITCHED = (
    "light",
    "plug",
    "heater",
    "fan",
    "tv",
    "speaker",
    "humidifier",
    "camera",
    "oven",
    "sprinkler",
)


def of_kind(*kinds: str) -> Pool:
    """Return a pool of the home's devices of these kinds (of any kind if none is named)."""

    def pick(draw: Draw) -> str | None:
        context = draw.context
        names = [d.name for d in context.devices if not kinds or d.kind in kinds]
        if context.last in names and likely(draw.rng, 0.3):  # so that "it" comes up
            return context.last
        return draw.rng.choice(names) if names else None

    return pick


def one_of(words: Sequence[str]) -> Pool:
    """Return a pool of fixed words."""
    return lambda draw: draw.rng.choice(words)


def number(low: int, high: int, step: int = 1) -> Pool:
    """Return a pool of whole numbers from low to high."""
    return lambda draw: str(draw.rng.randrange(low, high + 1, step))


def code(draw: Draw) -> str:
    """Return four to six digits."""
    return "".join(draw.rng.choice("0123456789") for _ in range(draw.rng.randrange(4, 7)))


def clock(draw: Draw) -> str:
    """Return a time of day."""
    return f"{draw.rng.randrange(24):02d}:{draw.rng.randrange(0, 60, 5):02d}"


def day_and_time(draw: Draw) -> str:
    """Return a weekday with a time."""
    return f"{draw.rng.choice(DAYS)} at {clock(draw)}"


def date(draw: Draw) -> str:
    """Return a day of the year."""
    return f"{draw.rng.randrange(1, 29)} {draw.rng.choice(MONTHS)}"


def item(draw: Draw) -> str:
    """Return a thing, now and then a made-up one."""
    if likely(draw.rng, 0.2):
        return f"{compose_word(draw.rng)} {draw.rng.choice(ITEMS).split()[-1]}"
    return draw.rng.choice(ITEMS)


def grocery(draw: Draw) -> str:
    """Return something to buy, now and then a made-up one."""
    if likely(draw.rng, 0.3):
        return compose_word(draw.rng)
    return draw.rng.choice(GROCERIES)


def place(draw: Draw) -> str:
    """Return a place, now and then one with a made-up word."""
    where = draw.rng.choice(PLACES)
    if likely(draw.rng, 0.15):
        head, _, tail = where.rpartition(" ")
        return f"{head} {compose_word(draw.rng)} {tail}"
    return where


def other_room(draw: Draw) -> str:
    """Return a room that no other slot holds yet."""
    return draw.rng.choice([room for room in ROOMS if room not in draw.slots.values()])


def home_room(draw: Draw) -> str:
    """Return a room, mostly one of the rooms in the list."""
    if likely(draw.rng, 0.9) and draw.context.devices:
        return draw.rng.choice(draw.context.devices).room
    return draw.rng.choice(ROOMS)


def kinds_word(draw: Draw) -> str:
    """Return the plural of a kind, mostly of one in the list."""
    if likely(draw.rng, 0.9) and draw.context.devices:
        return PLURALS[draw.rng.choice(draw.context.devices).kind]
    return draw.rng.choice(list(PLURALS.values()))


def untouched(draw: Draw) -> str | None:
    """Return a listed device that no command of this conversation has changed."""
    context = draw.context
    names = [d.name for d in context.devices if d.name not in context.touched]
    return draw.rng.choice(names) if names else None


def untouched_switch(draw: Draw) -> str | None:
    """Return such a device whose state is plainly on or off."""
    context = draw.context
    names = [
        d.name
        for d in context.devices
        if d.name not in context.touched and d.state.split()[0] in {"on", "off"}
    ]
    return draw.rng.choice(names) if names else None


def state(draw: Draw) -> str:
    """Return the listed state of the chosen device."""
    return draw.context.find(draw.slots["device"]).state


def room(draw: Draw) -> str:
    """Return the listed room of the chosen device."""
    return draw.context.find(draw.slots["device"]).room


def kind(draw: Draw) -> str:
    """Return the listed kind of the chosen device."""
    return draw.context.find(draw.slots["device"]).kind


def known(fact: str) -> Pool:
    """Return a pool of the subjects of which the user has stated this fact."""

    def pick(draw: Draw) -> str | None:
        subjects = list(draw.context.facts.get(fact, ()))
        return draw.rng.choice(subjects) if subjects else None

    return pick


def recalled(fact: str) -> Pool:
    """Return a pool of the one value stated of the chosen subject."""
    return lambda draw: draw.context.facts[fact][draw.slots["subject"]]


def unknown(fact: str, pool: Pool) -> Pool:
    """Return a pool of subjects of which this fact was not stated."""

    def pick(draw: Draw) -> str | None:
        subject = pool(draw)
        return None if subject in draw.context.facts.get(fact, ()) else subject

    return pick
