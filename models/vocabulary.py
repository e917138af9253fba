"""Rooms, things, people, device names and the other words that fill the slots."""

from random import Random
from typing import Final

from models.domain import likely, weighted


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(","))


ROOMS: Final = _words(
    "kitchen, living room, bedroom, bathroom, study, hall, garage, attic, cellar, nursery,"
    "guest room, dining room, laundry, office, garden, balcony, terrace, workshop, library, gym"
)
COLOURS: Final = _words(
    "red, green, blue, yellow, orange, purple, pink, white, cyan, magenta, turquoise, gold,"
    "violet, lime, teal, coral, amber, indigo, peach, mint"
)
MODES: Final = _words("heat, cool, auto, eco, away, sleep, dry, boost, holiday, comfort")
MUSIC: Final = _words(
    "jazz, rock, pop, blues, folk, soul, techno, opera, country, reggae, swing, the news,"
    "piano music, rain sounds, a podcast, the radio, classical music, film music, dance music"
)
INPUTS: Final = _words("hdmi 1, hdmi 2, hdmi 3, antenna, usb, streaming, game console, satellite")
SPEEDS: Final = _words("low, medium, high, turbo, quiet, breeze, night, maximum, minimum")
PROGRAMS: Final = _words(
    "cotton, wool, quick, eco, delicate, rinse, spin, intensive, sport, silk, bedding, half load"
)
DISHES: Final = _words(
    "bread, pizza, roast, cake, rice, soup, fish, potatoes, cookies, lasagne, stew, pie, tea, pasta"
)
ITEMS: Final = _words(
    "cup, red mug, spare key, ladder, toolbox, umbrella, stapler, torch, passport, blanket,"
    "first aid kit, charger, remote control, water bottle, newspaper, magnifier, hammer, tape,"
    "backpack, camera bag, wallet, guitar, chess set, sewing kit, paint, bucket, broom, rope,"
    "medicine, towel, scarf, tablet, notebook, screwdriver, battery, candle, drill, tent,"
    "dog leash, car key, bike pump, birthday card, board game, vase, hat, raincoat, suitcase,"
    "keys, glasses, phone, book, scissors, ball, jacket, shoes, gloves, letter, parcel, ring,"
    "watch, headphones, pen, wine, cake, bag, laptop, mouse, lamp oil, sunglasses, spare bulb"
)
PLACES: Final = _words(
    "in the blue box, in the red drawer, on the top shelf, under the stairs, behind the door,"
    "in the hall closet, on the kitchen table, under the bed, in the garage, in the attic,"
    "next to the sink, on the window sill, in the green bag, in the car, at the office,"
    "behind the sofa, in the left drawer, on the piano, in the tool shed, under the desk,"
    "on the bookcase, in the white cabinet, in the laundry basket, by the front door,"
    "in the cellar, on the workbench, in the glass jar, in the grey suitcase, in the fridge,"
    "in the freezer, in the cupboard, on the counter, in my bag, on my desk, at work, in my coat,"
    "under the pillow, in the top drawer, by the sofa, on the shelf, at home, behind the tv,"
    "in the safe, in the oven, on the roof, in the shoe box, next to the bed, in the mail box"
)
SURFACES: Final = _words(
    "table, counter, shelf, desk, sofa, floor, tray, workbench, window sill, bed, chair, cart"
)
PEOPLE: Final = _words(
    "Anna, Ben, Clara, David, Emma, Felix, Grace, Hugo, Ida, Jonas, Karin, Leo, Mia, Nora, Oscar,"
    "Paula, Ravi, Sofia, Tom, Uma, Victor, Wanda, Yusuf, Zoe, Grandma, Grandpa, Mum, Dad"
)
TASTES: Final = _words(
    "mint tea, black coffee, tea with honey, cold milk, apple juice, dark chocolate, spicy food,"
    "quiet music, warm light, fresh bread, long walks, old films, green apples, lemon cake,"
    "hot soup, the window seat, early mornings, strong cheese, ginger biscuits, tomato salad"
)
SECRETS: Final = _words(
    "gate, alarm, safe, garage, wifi, front door, tablet, bike lock, parcel box, cellar, shed,"
    "locker, router, printer, mail box, office"
)
VISITORS: Final = _words(
    "plumber, electrician, gardener, doctor, piano teacher, painter, cleaner, postman, nurse,"
    "babysitter, carpenter, vet, tutor, roofer, inspector, delivery"
)
DAYS: Final = _words("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday")
MONTHS: Final = _words(
    "January, February, March, April, May, June, July, August, September, October, November,"
    "December"
)
GROCERIES: Final = _words(
    "milk, bread, eggs, butter, rice, apples, coffee, tea, sugar, flour, onions, carrots, soap,"
    "cheese, tomatoes, pasta, bananas, salt, honey, yoghurt, olive oil, light bulbs, cat food,"
    "paper towels, washing powder, lemons, oats, pepper, beans, potatoes"
)
TASKS: Final = _words(
    "water the plants, call the bank, feed the cat, take out the bins, pay the rent, buy stamps,"
    "walk the dog, charge the bike, clean the filter, book the train, send the parcel,"
    "check the oven, wash the car, renew the passport, ring the school, defrost the freezer"
)
MESSAGES: Final = _words(
    "dinner is ready, I am on my way, please call me back, the parcel is here, lunch is at noon,"
    "do not wait for me, the bus is late, good luck today, we need milk, the door is open,"
    "see you tonight, the meeting is over, bring an umbrella, the cat is asleep"
)
GESTURES: Final = _words("wave, nod, bow, dance, spin, point, shrug, clap, salute, stretch")

SEVERAL: Final[dict[str, str]] = {
    "lights": "light", "lamps": "light", "plugs": "plug", "fans": "fan", "tvs": "tv",
    "televisions": "tv", "heaters": "heater", "radiators": "heater", "speakers": "speaker",
    "blinds": "blind", "curtains": "blind", "shutters": "blind", "shades": "blind",
    "locks": "lock", "doors": "lock", "humidifiers": "humidifier", "sprinklers": "sprinkler",
    "cameras": "camera", "robots": "robot", "vacuums": "vacuum", "thermostats": "thermostat",
}  # fmt: skip
"""Words for several devices, with their kinds."""


def kind_of(word: str) -> str:
    """Return the kind that a word for several devices names."""
    return SEVERAL[word]


OWN: Final[dict[str, tuple[str, ...]]] = {
    "favourite colour": COLOURS,
    "favourite food": DISHES,
    "favourite music": MUSIC,
    "favourite drink": _words("mint tea, black coffee, apple juice, cold milk, lemonade, cocoa"),
    "dentist": PEOPLE, "doctor": PEOPLE, "sister": PEOPLE, "brother": PEOPLE, "wife": PEOPLE,
    "husband": PEOPLE, "boss": PEOPLE, "teacher": PEOPLE, "neighbour": PEOPLE,
    "best friend": PEOPLE,
    "dog": _words("Rex, Bella, Luna, Max, Rocky, Buddy, Daisy, Toby"),
    "cat": _words("Tiger, Mimi, Felix, Luna, Simba, Ginger, Smokey, Oreo"),
    "day off": DAYS, "shopping day": DAYS, "car": COLOURS, "size": _words("small, medium, large"),
}  # fmt: skip
"""Facts that a user tells of himself, and their values."""

PLURALS: Final[dict[str, str]] = {
    "light": "lights", "plug": "plugs", "thermostat": "thermostats", "heater": "heaters",
    "blind": "blinds", "lock": "locks", "speaker": "speakers", "tv": "tvs", "fan": "fans",
    "camera": "cameras", "vacuum": "vacuums", "robot": "robots", "oven": "ovens",
    "washer": "washers", "humidifier": "humidifiers", "sprinkler": "sprinklers",
    "sensor": "sensors",
}  # fmt: skip


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


SEEN: Final[dict[str, tuple[str, ...]]] = {
    "light": _names(
        "desk lamp, floor lamp, ceiling light, reading lamp, bedside lamp, wall light,"
        "porch light, garden light, strip light, night light, mirror light, counter light,"
        "stair light, piano lamp, corner lamp, spot light, fairy lights, closet light"
    ),
    "plug": _names(
        "coffee plug, printer plug, charger plug, aquarium plug, radio plug, toaster plug,"
        "router plug, freezer plug, bench plug, window plug, tree plug, pump plug,"
        "iron plug, mixer plug"
    ),
    "thermostat": _names(
        "main thermostat, upstairs thermostat, downstairs thermostat, nursery thermostat,"
        "guest thermostat, floor thermostat, wall thermostat, north thermostat,"
        "south thermostat, loft thermostat, office thermostat, hall thermostat"
    ),
    "heater": _names(
        "towel heater, panel heater, space heater, oil heater, bath heater, water heater,"
        "patio heater, desk heater, tent heater, radiator, small radiator, tall radiator"
    ),
    "blind": _names(
        "window blind, door blind, roof blind, left blind, right blind, kitchen shutter,"
        "east curtain, west curtain, balcony awning, bay curtain, skylight shade,"
        "garage door, patio shutter, bed curtain"
    ),
    "lock": _names(
        "front door, back door, side door, cellar door, garden gate, shed lock, bike lock,"
        "gun safe, wine cabinet, mail box, office door, attic hatch"
    ),
    "speaker": _names(
        "kitchen speaker, shelf speaker, desk speaker, bath radio, clock radio, sound bar,"
        "party speaker, ceiling speaker, left speaker, right speaker, record player,"
        "garden speaker, bedside radio"
    ),
    "tv": _names(
        "main tv, bedroom tv, kitchen tv, small screen, big screen, projector,"
        "guest tv, wall screen, den tv, gym tv, old television, new television"
    ),
    "fan": _names(
        "ceiling fan, desk fan, floor fan, tower fan, window fan, exhaust fan, attic fan,"
        "bath fan, box fan, stove hood, pedestal fan, cellar fan, duct fan"
    ),
    "camera": _names(
        "door camera, porch camera, yard camera, nursery camera, drive camera, pet camera,"
        "roof camera, gate camera, hall camera, barn camera, stair camera, pool camera"
    ),
    "vacuum": _names(
        "robot vacuum, upstairs vacuum, downstairs vacuum, little sweeper, floor mop,"
        "window cleaner, pool cleaner, lawn mower, dust buddy, carpet cleaner, quiet sweeper"
    ),
    "robot": _names(
        "rover, kitchen robot, helper robot, arm robot, porter, delivery robot, walker,"
        "tall robot, small robot, butler, guard robot, garden robot, scout, lifter, courier"
    ),
    "oven": _names(
        "oven, wall oven, steam oven, pizza oven, bread maker, air fryer, slow cooker,"
        "rice cooker, grill, toaster oven, coffee maker, kettle, tea maker, waffle iron"
    ),
    "washer": _names(
        "washer, dryer, dishwasher, washing machine, tumble dryer, top washer, sock washer,"
        "shared washer, guest dryer, bottle washer, cellar washer, glass washer"
    ),
    "humidifier": _names(
        "humidifier, air purifier, dehumidifier, bedroom purifier, mist maker, air cleaner,"
        "nursery humidifier, plant humidifier, cellar dehumidifier, scent diffuser"
    ),
    "sprinkler": _names(
        "lawn sprinkler, front sprinkler, back sprinkler, rose sprinkler, drip line,"
        "greenhouse hose, tomato sprinkler, hedge sprinkler, fountain, pond pump, rain valve"
    ),
    "sensor": _names(
        "door sensor, window sensor, smoke sensor, hall sensor, soil sensor, air sensor,"
        "motion sensor, rain gauge, bath thermometer, freezer sensor, leak sensor, gas meter"
    ),
}

UNSEEN: Final[dict[str, tuple[str, ...]]] = {
    "light": _names("juniper lamp, marigold light, zodiac lantern, obelisk lamp, velvet uplighter"),
    "plug": _names("tadpole plug, quartz outlet, badger socket"),
    "thermostat": _names("tundra thermostat, meridian dial, glacier thermostat"),
    "heater": _names("basalt heater, ember stove, salamander heater"),
    "blind": _names("origami blind, harbour curtain, papyrus shade"),
    "lock": _names("citadel door, walnut hatch, drawbridge gate"),
    "speaker": _names("nightingale speaker, thunder box, cricket radio"),
    "tv": _names("panorama screen, octagon tv, kaleidoscope"),
    "fan": _names("zephyr fan, windmill fan, monsoon fan"),
    "camera": _names("falcon camera, periscope, lynx camera"),
    "vacuum": _names("hedgehog vacuum, beetle sweeper, pelican mop"),
    "robot": _names("jasper robot, clementine, figaro, sprocket"),
    "oven": _names("vesuvius oven, dragon kettle, samovar"),
    "washer": _names("otter washer, niagara dryer, puffin washer"),
    "humidifier": _names("orchid mister, lagoon purifier, fern humidifier"),
    "sprinkler": _names("heron sprinkler, cascade hose, willow sprinkler"),
    "sensor": _names("sparrow sensor, comet gauge, lantern sensor"),
}

_COMMON = frozenset(word for names in SEEN.values() for name in names for word in name.split())
_UNSEEN_WORDS = frozenset(
    word for names in UNSEEN.values() for name in names for word in name.split()
)
UNSEEN_WORDS: Final = _UNSEEN_WORDS - _COMMON

_WORDS: Final = tuple(sorted(_COMMON))
_SHAPES: Final = {"word": 0.2, "noun": 0.55, "words": 0.1, "number": 0.15}
_LENGTHS: Final = range(3, 14)
_ONSETS = _names(
    ",b,bl,br,c,ch,cl,cr,d,dr,f,fl,g,gl,gr,h,j,k,l,m,n,p,pl,pr,qu,r,s,sc,sh,sl,sp,st,t,th,tr,v,w,z"
)
_NUCLEI = _names("a,e,i,o,u,y,ai,au,ea,ee,ia,io,oo,ou")
_CODAS = _names(",,,,b,ck,d,g,l,ll,m,n,nd,ng,nt,p,r,rd,rn,s,sh,st,t,x")


def compose_word(rng: Random) -> str:
    """Return a made-up lower-case word that is no unseen word."""
    if likely(rng, 0.1):
        return rng.choice(_WORDS) + rng.choice(_WORDS)
    while True:
        count = rng.choice((1, 2, 2, 2, 3, 3, 4))
        word = "".join(
            rng.choice(_ONSETS) + rng.choice(_NUCLEI) + rng.choice(_CODAS) for _ in range(count)
        )
        if len(word) in _LENGTHS and word not in UNSEEN_WORDS:
            return word


def compose_name(rng: Random, kind: str) -> str:
    """Return a made-up device name, with or without the noun of its kind."""
    noun = rng.choice(SEEN[kind]).split()[-1]
    shape = weighted(rng, _SHAPES)
    first = noun if shape == "number" else compose_word(rng)
    if shape == "word":
        return first
    last = {"noun": noun, "words": compose_word(rng), "number": str(rng.randrange(1, 100))}
    return f"{first} {last[shape]}"
