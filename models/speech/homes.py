"""Homes as people list them: kinds, rooms and names from large pools."""

from random import Random
from typing import Final, NamedTuple

from models.conversations import HEADS, system_prompt
from models.domain import Context, Device, likely
from models.vocabulary import MUSIC, PEOPLE, ROOMS, SEEN, compose_word


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(","))


PLACES: Final = (*ROOMS, *_words(
    "hallway, landing, lounge, porch, patio, driveway, utility room, laundry room, studio, shed,"
    "kitchenette, greenhouse, conservatory, pantry, basement, loft, den, playroom, master bedroom,"
    "spare room, kids room, main bathroom, entrance, stairs, front yard, back yard, courtyard,"
    "carport, sauna, cloakroom, reception, corridor, family room, music room, toilet, ensuite,"
    "bar, barn, pool, roof, veranda, mudroom, dressing room, sun room, closet, storage room,"
    "boys room, girls room, upstairs hall, downstairs hall, guest bathroom, snug, annex, deck"
))  # fmt: skip
_FIRST: Final = _words(
    "left, right, big, small, old, new, tall, little, upper, lower, front, back, side, upstairs,"
    "downstairs, main, second, corner, wall, ceiling, floor, desk, table, bedside, bed, window,"
    "door, red, blue, white, black, green, wooden, glass, copper, round, star, moon, tower, smart,"
    "reading, night, work, party, guest, kids, baby, window seat, sofa, mirror, counter, shelf,"
    "bookshelf, piano, sink, bath, shower, towel, pool, garden, lawn, rose, tree, fence, path,"
    "step, gate, entry, hanging, pendant, linen, roller, venetian, velour, striped, standing,"
    "portable, tiny, east, west, north, south, cosy, quiet, outdoor, indoor, spare, fireplace"
)  # fmt: skip


class Kind(NamedTuple):
    """A kind as lists call it: ours that knows the same, nouns of names, and what people say."""

    base: str
    nouns: tuple[str, ...]
    said: tuple[str, ...]
    often: float = 1.0
    alone: tuple[str, ...] = ()


def _kind(base: str, nouns: str, said: str, often: float = 1.0, alone: str = "") -> Kind:
    return Kind(base, _words(nouns), _words(said), often, _words(alone) if alone else ())


SHOWN: Final[dict[str, Kind]] = {
    "light": _kind(
        "light", "lamp, light, lights, strip, spotlight, spot, lamp, light, bulb, light strip",
        "light, lamp", 5,
        "LED strip, chandelier, fairy lights, spotlights, string lights, LED panel, uplight",
    ),
    "lamp": _kind("light", "lamp, lamp, light", "light, lamp", 0.4),
    "dimmer": _kind("light", "dimmer, light, lamp", "light, dimmer", 0.2),
    "plug": _kind(
        "plug", "plug, wall plug, pump, charger, plug", "plug", 1.2,
        "kettle plug, toaster plug, printer plug, fountain pump, tv plug, christmas tree,"
        "aquarium, router plug, modem plug, charger, pond pump, sewing machine, monitor, heat mat",
    ),
    "smart plug": _kind("plug", "plug", "plug", 0.3),
    "switch": _kind("plug", "switch, pump, boiler", "switch", 0.3, "boiler, doorbell, immersion"),
    "coffee machine": _kind(
        "plug", "coffee machine, coffee maker, espresso machine", "coffee machine, coffee maker",
        0.5, "coffee machine, coffee maker, espresso machine, percolator",
    ),
    "kettle": _kind("plug", "kettle", "kettle", 0.3, "kettle, tea kettle"),
    "toaster": _kind("plug", "toaster", "toaster", 0.2, "toaster"),
    "computer": _kind("plug", "computer, screen", "computer", 0.2, "computer, printer, server"),
    "thermostat": _kind(
        "thermostat", "thermostat, heating, thermostat", "thermostat, heating", 1.3,
        "thermostat, heating",
    ),
    "air conditioner": _kind(
        "thermostat", "air conditioner, AC, air conditioner", "air conditioner, AC, aircon,"
        "air conditioning, air con, a/c", 0.6, "air conditioner, air conditioning, AC",
    ),
    "heater": _kind("heater", "heater, radiator, heater", "heater", 1.1, "heater, radiator"),
    "radiator": _kind("heater", "radiator", "radiator", 0.4, "radiator"),
    "blind": _kind("blind", "blind, shutter, shade, blind", "blind", 1.3, "roller blind, blind"),
    "curtain": _kind("blind", "curtain, curtains, drapes, curtains", "curtains, curtain", 0.9,
                     "curtains, curtain"),
    "shutter": _kind("blind", "shutter, shutters", "shutter, shutters", 0.3),
    "awning": _kind("blind", "awning", "awning", 0.4, "awning"),
    "gate": _kind("blind", "gate", "gate", 0.5, "gate, driveway gate, front gate"),
    "garage door": _kind("blind", "garage door", "garage door, garage", 0.5, "garage door"),
    "window": _kind("blind", "window, skylight", "window", 0.4, "skylight, roof window"),
    "lock": _kind("lock", "door, door, lock, gate, door", "door, lock", 2.2,
                  "front door, back door, side door, patio door, main entrance, mail box"),
    "door lock": _kind("lock", "door", "door", 0.3, "front door, back door"),
    "speaker": _kind("speaker", "speaker, speaker, stereo, soundbar", "speaker", 1.3,
                     "soundbar, stereo, hi-fi, smart speaker, jukebox"),
    "radio": _kind("speaker", "radio", "radio", 0.7, "radio, clock radio, shower radio"),
    "tv": _kind("tv", "tv, TV, screen", "tv, TV, telly, television", 0.5, "tv, TV, projector"),
    "television": _kind("tv", "television", "television, TV, telly, tv", 0.6, "television"),
    "fan": _kind("fan", "fan", "fan", 1.2, "extractor fan, ceiling fan, cooker hood, fan"),
    "camera": _kind("camera", "camera, camera, cam", "camera", 1.0, "doorbell camera, webcam"),
    "doorbell": _kind("camera", "doorbell", "doorbell", 0.2, "doorbell"),
    "vacuum": _kind("vacuum", "vacuum, sweeper, mop", "vacuum, vacuum cleaner, hoover", 1.1,
                    "robot vacuum, vacuum, vacuum cleaner, vacuum robot"),
    "robot": _kind("robot", "robot, helper, bot", "robot", 1.5, "robot, butler, helper, rover"),
    "oven": _kind("oven", "oven", "oven", 0.7, "oven, air fryer, slow cooker, microwave"),
    "cooker": _kind("oven", "cooker, stove", "cooker", 0.2, "cooker, stove"),
    "dishwasher": _kind("washer", "dishwasher", "dishwasher", 0.5, "dishwasher"),
    "washing machine": _kind("washer", "washing machine, washer", "washing machine, washer", 0.5,
                             "washing machine"),
    "dryer": _kind("washer", "dryer, tumble dryer", "dryer", 0.4, "dryer, tumble dryer"),
    "washer": _kind("washer", "washer", "washer, washing machine", 0.3, "washer"),
    "humidifier": _kind("humidifier", "humidifier", "humidifier", 0.5, "humidifier"),
    "air purifier": _kind("humidifier", "purifier, air purifier", "purifier, air purifier", 0.3,
                          "air purifier"),
    "sprinkler": _kind("sprinkler", "sprinkler, sprinklers, hose", "sprinkler, sprinklers", 0.7,
                       "lawn sprinkler, irrigation, drip line, garden hose"),
    "sensor": _kind("sensor", "sensor, thermometer, detector", "sensor", 0.4,
                    "smoke detector, rain gauge, thermometer"),
    "timer": _kind("timer", "timer", "timer", 0.35, "timer, kitchen timer, egg timer"),
    "clock": _kind("clock", "clock", "alarm clock, clock", 0.35, "alarm clock, clock"),
    "alarm": _kind("clock", "alarm", "alarm", 0.15, "alarm, morning alarm"),
    "list": _kind("list", "list", "list", 0.35, "shopping list, list, grocery list"),
    "phone": _kind("phone", "phone", "phone", 0.35, "phone, telephone, house phone"),
    "calendar": _kind("calendar", "calendar", "calendar", 0.35,
                      "calendar, family calendar, wall calendar"),
}  # fmt: skip
ONCE: Final = frozenset({"timer", "clock", "list", "phone", "calendar"})
"""Kinds of ours of which a home has one at most."""
_PETS: Final = _words(
    "Robbie, Sparky, Bolt, Rusty, Pepper, Chip, Biff, Maxi, Toto, Wally, Rosie, Nugget, Pixel,"
    "Zippy, Bubbles, Alfred, Jeeves, Marvin, Fluff, Gizmo, Scooter, Crumb, Tilly, Otto, Momo"
)


def _state(rng: Random, base: str, shown: str) -> str:
    n = rng.randrange(1, 100)
    states: dict[str, tuple[str, ...]] = {
        "light": ("on", "off", "off", f"on at {n}%", f"{n}%"),
        "thermostat": (f"set to {rng.randrange(5, 31)} degrees",) * 3 + ("off",),
        "heater": ("on", "off", "off", f"set to {rng.randrange(5, 31)} degrees"),
        "blind": ("open", "closed", "closed", f"{n}% open"),
        "lock": ("locked", "unlocked"),
        "speaker": ("off", "paused", "playing", "playing", "muted", f"playing {rng.choice(MUSIC)}"),
        "vacuum": ("docked", "cleaning", "charging", "idle"),
        "robot": ("idle", "charging", "busy", "docked", "moving"),
        "washer": ("off", "running", "finished", "on", f"{n} minutes left"),
        "sensor": (f"{n // 3} degrees", f"{n}%", "clear", "dry", "active"),
        "timer": ("idle", "off", f"{n} minutes left"),
        "clock": ("no alarm set", "off", f"set for {n % 12:02d}:30"),
        "list": ("empty", f"{n % 12 + 1} items"),
        "phone": ("idle", "ringing", "charging"),
        "calendar": ("empty", f"{n % 9 + 1} entries"),
        "tv": ("off", "off", "on", "muted"),
        "oven": ("off", "off", "on", f"on at {n * 2 + 50} degrees"),
    }
    if shown == "air conditioner":
        return rng.choice(("off", "off", "on", f"set to {n % 12 + 16} degrees"))
    return rng.choice(states.get(base, ("on", "off")))


def _name(rng: Random, shown: str, room: str) -> str:
    kind = SHOWN[shown]
    noun = rng.choice(kind.nouns)
    if kind.base in ONCE:
        return rng.choice(kind.alone)
    if kind.base in {"vacuum", "robot"} and likely(rng, 0.35):
        return rng.choice(_PETS) if likely(rng, 0.5) else compose_word(rng).capitalize()
    way = rng.random()
    if kind.alone and way < 0.3:
        return rng.choice(kind.alone)
    if way < 0.55:
        return f"{room if likely(rng, 0.85) else rng.choice(PLACES)} {noun}"
    if way < 0.8:
        return f"{rng.choice(_FIRST)} {noun}"
    if way < 0.88:
        return f"{compose_word(rng)} {noun}"
    if way < 0.91:
        return f"{rng.choice(PEOPLE)}'s {noun}"
    if shown in SEEN and way < 0.98:
        return rng.choice(SEEN[shown])
    return compose_word(rng)


class Home(NamedTuple):
    """A home: its devices as the list shows them, and the same with our kinds."""

    shown: tuple[Device, ...]
    devices: tuple[Device, ...]

    def system(self, rng: Random) -> str:
        """Return the system prompt."""
        return system_prompt(rng.choice(HEADS[:1] * 4 + HEADS), self.shown)

    def context(self) -> Context:
        """Return the state of a conversation that begins in this home."""
        return Context(self.devices, listed=True)

    def said(self, device: Device) -> tuple[str, ...]:
        """Return the nouns by which people call a device."""
        shown = next(one for one in self.shown if one.name == device.name)
        return SHOWN[shown.kind].said


_KINDS: Final = tuple(SHOWN)
_OFTEN: Final = tuple(kind.often for kind in SHOWN.values())


def make_home(rng: Random) -> Home:
    """Return a home of a few rooms, now and then with several devices of a kind."""
    count = rng.choice((2, 3, 4, 4, 5, 5, 6, 6, 7, 7, 7, 8, 8, 9, 10, 12))
    rooms = rng.sample(PLACES, min(count, rng.randrange(2, 7)))
    if likely(rng, 0.3):
        rooms = rng.sample(ROOMS, min(count, rng.randrange(2, 6)))
    shown: dict[str, Device] = {}
    once: set[str] = set()
    kinds = rng.choices(_KINDS, _OFTEN, k=count)
    for index in range(1, count):
        if likely(rng, 0.15):
            kinds[index] = kinds[index - 1]
    for word in kinds:
        base = SHOWN[word].base
        room = rng.choice(rooms)
        name = _name(rng, word, room)
        if base in ONCE and base in once:
            continue
        once.add(base)
        shown.setdefault(name, Device(name, word, room, _state(rng, base, word)))
    devices = tuple(one._replace(kind=SHOWN[one.kind].base) for one in shown.values())
    return Home(tuple(shown.values()), devices)
